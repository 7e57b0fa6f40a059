"""Where API keys come from: a file or the environment, because secrets stand in no flag and no setting."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cluster.errors import ConfigError
from router_service.api_keys import ApiKeys, parse_api_keys

API_KEYS_VARIABLE = "POINTSMAN_API_KEYS"
"""As the lines of a file; commas end lines too."""


def read_api_keys(file: str, environment: Mapping[str, str]) -> ApiKeys | None:
    """None where neither is given. Raises ConfigError, which shows no key."""
    text = environment.get(API_KEYS_VARIABLE)
    if file and text is not None:
        raise ConfigError(f"--api-key-file and {API_KEYS_VARIABLE} are one setting: give one")
    if text is not None:
        return parse_api_keys(text.replace(",", "\n"), API_KEYS_VARIABLE)
    return parse_api_keys(_read(file), f"--api-key-file {file}") if file else None


def take_api_keys(file: str, environment: MutableMapping[str, str]) -> ApiKeys | None:
    """As `read_api_keys`; the keys leave the environment, so that no process which is started gets them."""
    keys = read_api_keys(file, environment)
    environment.pop(API_KEYS_VARIABLE, None)
    return keys


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--api-key-file {file}: not text: {error.reason} at byte {error.start}"
        ) from error
