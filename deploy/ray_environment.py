"""What Ray reads from the environment only, in part while it is imported; apart, because it must run before that."""

import os

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",  # log lines of actors without colours
    "RAY_SCHEDULER_EVENTS": "0",  # hints to use commands of Ray
    "RAY_DEDUP_LOGS": "0",  # one rank's line must not hide another's
}


_JOINED = {"RAY_AUTH_MODE": "token"}
"""A Ray of our own sets that up by itself; a process that joins one is refused without it."""

LAUNCHER_ENVIRONMENT = _JOINED | {
    "RAY_UP_enable_autoscaler_v2": "0",  # v2 starts one host too few of a list of machines
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""For `ray up`, `ray exec` and `ray down`."""


def set_ray_environment(*, joins: bool = False) -> None:
    """A user's own values win."""
    for name, value in (_SETTINGS | _JOINED if joins else _SETTINGS).items():
        os.environ.setdefault(name, value)
