"""The memory of the host that a rank shares with others."""

from dataclasses import dataclass
from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostMemory:
    host: str
    """The same for processes that share their memory, in whichever container they are: the kernel's boot id."""
    free_bytes: int
    """As the kernel estimates it."""


def host_memory() -> HostMemory:
    return HostMemory(_BOOT_ID.read_text().strip(), int(psutil.virtual_memory().available))
