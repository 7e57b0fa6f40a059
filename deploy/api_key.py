"""The bearer token that clients must send, from a file: secrets stand in no flag and no setting."""

from pathlib import Path

from cluster.errors import ConfigError


def read_api_key(file: str) -> str | None:
    """First line of the file; None without a file. Raises ConfigError."""
    if not file:
        return None
    try:
        lines = Path(file).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {file}: not text: {error}") from error
    if not lines or not lines[0].strip():
        raise ConfigError(f"--api-key-file {file}: the first line is empty, it must hold the key")
    return lines[0].strip()
