"""Files that hold a secret."""

import stat
from pathlib import Path

from cluster.errors import ConfigError

_OTHERS = stat.S_IRWXO
"""A group may read: that is how secrets are mounted for a user that is not root."""


def check_private(flag: str, file: str) -> None:
    """Raises ConfigError for one that every user of this host may read or write."""
    mode = stat.S_IMODE(Path(file).stat().st_mode)
    if mode & _OTHERS:
        raise ConfigError(
            f"{flag} {file}: every user of this host may open it (mode {mode:04o}); chmod o= it"
        )
