"""Can this host listen where it is told to. Asked before a minute of loading, not after."""

import os
import socket

from cluster.config import HttpSection
from cluster.errors import ConfigError


def check_ports(http: HttpSection) -> None:
    """Raises ConfigError with the first problem."""
    for problem in port_problems(http):
        raise ConfigError(problem)


def port_problems(http: HttpSection) -> tuple[str, ...]:
    """One line each."""
    if http.port and http.port == http.admin_port:
        return (f"--port and --admin-port are both {http.port}: they must differ",)
    asked = [
        _problem(http.host, http.port, "--port"),
        _problem(http.admin_host, http.admin_port, "--admin-port"),
    ]
    return tuple(problem for problem in asked if problem is not None)


def _problem(host: str, port: int, flag: str) -> str | None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            return None
    except OSError as error:
        return f"{flag} {port}: cannot listen on {host}:{port}: {_why(error)}" + (
            f"; {flag} 0 takes any free port" if port else ""
        )


def _why(error: OSError) -> str:
    """`create_server` adds the address once more to its text; a name that is not known has no errno of the system."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return str(error.strerror or error)
    return os.strerror(error.errno)
