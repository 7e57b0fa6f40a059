"""What `pointsman up` and `down` run on hosts, as text for bash. Pure."""

import re
import shlex
from collections.abc import Sequence

SERVES_ALREADY = 3
LEFT_RUNNING = 4
"""Exit codes of these scripts."""
NOT_DRAINED = "what served did not end"
_SERVES = "serves already, process "
_SERVES_LINE = re.compile(rf"^{_SERVES}(\d+)\s*$", re.MULTILINE)
LOOKS_PER_SECOND = 5
RAY_GRACE_SECONDS = 5
_OF_RAY = "[r]aylet|[g]cs_server|[r]ay::|[r]ay/autoscaler/|[r]ay/dashboard/|[r]ay/_private/"
"""The brackets keep the shell that looks, and has this in its own command line, out of what it finds."""
_OF_US = "[p]ointsman serve"


def folder_of(cluster: str) -> str:
    """On the head: log and process id of what serves there. For a shell, unquoted."""
    return f"~/.pointsman/{cluster}"


def log_of(cluster: str) -> str:
    return f"{folder_of(cluster)}/serve.log"


def refuse_if_serving(cluster: str) -> str:
    """SERVES_ALREADY, and a line for `serving_process`, if it does."""
    return (
        f"{_pid_of_serve(cluster)}if serves; then echo '{_SERVES}'$pid; exit {SERVES_ALREADY}; fi\n"
    )


def serving_process(output: str) -> int | None:
    """What `refuse_if_serving` has found."""
    match = _SERVES_LINE.search(output)
    return None if match is None else int(match[1])


def start_serving(cluster: str, programs: str, arguments: Sequence[str]) -> str:
    """Detached, with its log in a file of its own."""
    command = f"{programs}pointsman serve {shlex.join(arguments)}"
    return (
        refuse_if_serving(cluster)
        + f"umask 077; mkdir -p {folder_of(cluster)} && cd {folder_of(cluster)} || exit 1\n"
        + f"nohup setsid {command} > serve.log 2>&1 < /dev/null &\n"
        + "echo $! > serve.pid\n"
    )


def follow_log(cluster: str) -> str:
    """Ends when what serves does."""
    folder = folder_of(cluster)
    return f"exec tail -n +1 -s 0.2 --pid=$(cat {folder}/serve.pid) -F {folder}/serve.log 2>/dev/null\n"


def stop_serving(cluster: str, seconds: float) -> str:
    """Drains; after `seconds` it is killed, which is told. Nothing to stop is no error."""
    return (
        _pid_of_serve(cluster)
        + "if serves; then kill -TERM $pid; fi\n"
        + f"for _ in $(seq {int(seconds * LOOKS_PER_SECOND)}); do serves || break; "
        + f"sleep {1 / LOOKS_PER_SECOND}; done\n"
        + "if serves; then kill -KILL $pid; "
        + f"echo '{NOT_DRAINED} within {seconds:g} s and was killed'; fi\n"
        + f"rm -f {folder_of(cluster)}/serve.pid\n"
    )


def stop_host(cluster: str, programs: str) -> str:
    """Ends Ray there, and with it all that runs in it; then what serves still, which would wait for Ray's head to come
    back, or start it again; then what is left of Ray. LEFT_RUNNING, and the processes, if some do not end."""
    left = f"ps -eo pid=,args= | grep -E '{_OF_RAY}|{_OF_US}'"
    stop = f"{programs}ray stop"
    return (
        f"left() {{ {left}; }}\n"
        f"if left > /dev/null; then {stop} --grace-period {RAY_GRACE_SECONDS} > /dev/null 2>&1; fi\n"
        f"ps -eo pid=,args= | grep -E '{_OF_US}' | while read -r pid _; do kill -KILL $pid; done\n"
        f"if left > /dev/null; then {stop} --force > /dev/null 2>&1; fi\n"
        f"rm -f /tmp/ray/cluster-{cluster}.state /tmp/ray/cluster-{cluster}.lock\n"
        f"for _ in $(seq {RAY_GRACE_SECONDS * LOOKS_PER_SECOND}); do "
        f"left > /dev/null || exit 0; sleep {1 / LOOKS_PER_SECOND}; done\n"
        f"left; exit {LEFT_RUNNING}\n"
    )


def _pid_of_serve(cluster: str) -> str:
    """A number that another program has got since does not count."""
    return (
        f"pid=$(cat {folder_of(cluster)}/serve.pid 2>/dev/null)\n"
        "serves() { [ -n \"$pid\" ] && tr '\\0' ' ' < /proc/$pid/cmdline 2>/dev/null | "
        f"grep -q '{_OF_US}'; }}\n"
    )
