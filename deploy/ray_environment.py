"""What Ray reads from the environment only, in part while it is imported; apart, because it must run before that."""

import os

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",  # log lines of actors without colours
    "RAY_DEDUP_LOGS": "0",  # one rank's line must not hide another's
}


def set_ray_environment() -> None:
    """A user's own values win."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
