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


_HEAD_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
HEAD_PATIENCE_SECONDS = 60.0
"""After so long without its head a process of Ray ends itself, whatever it does, if nobody says otherwise."""


def set_ray_environment() -> None:
    """A user's own values win."""
    _set(_SETTINGS)


def set_joined_ray_environment(head_timeout_seconds: float) -> None:
    """Before a Ray that runs already is joined: this process must not end before it has given its head up."""
    patience = {_HEAD_PATIENCE: str(int(head_timeout_seconds + HEAD_PATIENCE_SECONDS))}
    _set(_SETTINGS | _JOINED | patience)


def _set(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)
