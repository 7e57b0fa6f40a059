"""One state file while it is written. Owner of its descriptor and its size; everything the disk can refuse is here."""

import contextlib
import os
from pathlib import Path
from typing import Protocol


class StateFile(Protocol):
    """What the writer needs of a file. All but `close` raise OSError as the disk does."""

    @property
    def size(self) -> int: ...

    def append(self, data: bytes | bytearray) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class AppendFile:
    """A file that must not exist yet, readable and writable by its owner alone, because tokens of prompts go in."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self.size = 0

    def append(self, data: bytes | bytearray) -> None:
        """All of it, or what the disk took of it is cut off again, as far as it lets that happen."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what had to be there was synced
            os.close(self._descriptor)
