"""Where a rank runs: told by the rank itself, shown by the launcher and in /admin/status."""

import msgspec


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank's process runs now."""

    host: str
    """Address of its host, as the other hosts reach it."""
    device: str
    """cpu, or cuda:N, counted over the host's devices."""
