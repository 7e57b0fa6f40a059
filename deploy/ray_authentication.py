"""Ray's token authentication: its ports listen on every address of a host, and who reaches them could run any code."""

import secrets
from collections.abc import Mapping, MutableMapping

from cluster.errors import ConfigError

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"


def check_ray_authentication(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where it is switched off."""
    mode = environment.get(MODE, "token")
    if mode.lower() != "token":
        raise ConfigError(
            f"{MODE}={mode}: whoever reaches Ray's ports could run any code here; unset it, or set "
            "it to token"
        )


def set_own_token(environment: MutableMapping[str, str]) -> None:
    """For a Ray that this process starts and ends; a user's own token wins. Left to itself Ray keeps one in the home
    directory for good, in a file that others may read. It stays the same for all that this process starts: Ray reads
    it once."""
    if _TOKEN_FILE not in environment:
        environment.setdefault(TOKEN, secrets.token_hex(32))
