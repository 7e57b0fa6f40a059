"""Keys of the two ports: from a file or the environment each, because secrets stand in no flag and no setting."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cluster.config import HttpSection
from cluster.errors import ConfigError
from deploy.private_files import check_private
from router_service.api_keys import ApiKeys, HttpKeys, parse_api_keys

API_KEYS_VARIABLE = "POINTSMAN_API_KEYS"
"""As the lines of a file; commas end lines too."""
ADMIN_KEYS_VARIABLE = "POINTSMAN_ADMIN_KEYS"
"""Likewise."""
_API_FLAG, _ADMIN_FLAG = "--api-key-file", "--admin-key-file"


def read_http_keys(http: HttpSection, environment: Mapping[str, str]) -> HttpKeys:
    """Raises ConfigError, which shows no key."""
    keys = HttpKeys(
        api=read_keys(_API_FLAG, http.api_key_file, API_KEYS_VARIABLE, environment),
        admin=read_keys(_ADMIN_FLAG, http.admin_key_file, ADMIN_KEYS_VARIABLE, environment),
    )
    if keys.api is not None and keys.admin is not None and keys.api.shares_a_key_with(keys.admin):
        raise ConfigError(
            "an admin key is an API key too: whom it was given as the one could use it as the "
            "other; admin keys must be keys of their own"
        )
    return keys


def take_http_keys(http: HttpSection, environment: MutableMapping[str, str]) -> HttpKeys:
    """As `read_http_keys`; the keys leave the environment, so that no process which is started gets them."""
    keys = read_http_keys(http, environment)
    for variable in (API_KEYS_VARIABLE, ADMIN_KEYS_VARIABLE):
        environment.pop(variable, None)
    return keys


def read_keys(
    flag: str, file: str, variable: str, environment: Mapping[str, str]
) -> ApiKeys | None:
    """None where neither is given. Raises ConfigError, which shows no key."""
    text = environment.get(variable)
    if file and text is not None:
        raise ConfigError(f"{flag} and {variable} are one setting: give one")
    if text is not None:
        return parse_api_keys(text.replace(",", "\n"), variable)
    if not file:
        return None
    keys = parse_api_keys(_read(flag, file), f"{flag} {file}")
    check_private(flag, file)
    return keys


def _read(flag: str, file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag} {file}: not text: {error.reason} at byte {error.start}"
        ) from error
