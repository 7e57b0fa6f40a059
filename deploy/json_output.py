"""The file of `--json` (and of `--png`): refused before any work is done for it, written at the end."""

import json
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError


def check_writable(file: Path | None, flag: str = "--json") -> None:
    """Opens it as the one who writes it will, changing nothing. Raises ConfigError."""
    if file is None:
        return
    existed = file.exists()
    try:
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise refused(file, error, flag) from error


def write_json(value: dict[str, Any], file: Path | None) -> None:
    """Overwrites. Raises ConfigError."""
    if file is None:
        return
    try:
        file.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise refused(file, error, "--json") from error


def refused(file: Path, error: OSError, flag: str) -> ConfigError:
    return ConfigError(f"{flag} {file}: {error.strerror}")
