"""What `pointsman up` and `down` need to know of a file for `ray up`. Ray checks the rest of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RAY_START = re.compile(r"(?P<folder>(?:[^\s;&|'\"]*/)?)ray\s+start\b")
_TOKEN = "/.ray/auth_token"
OWN_MACHINES = "local"
"""Ray's name of the provider that only knows addresses."""


@dataclass(frozen=True)
class ClusterFile:
    """hosts: head first; empty where a cloud hands out the addresses
    num_hosts:    that a start waits for
    ssh_user, ssh_key, ssh_proxy_command: None: ssh's own defaults
    programs:     folder of `ray` on the hosts with its slash, and so of `pointsman`; empty: they are on the PATH
    token_file:   of Ray, on this machine, which the file hands to the hosts; None: it hands out none
    """

    path: Path
    name: str
    provider: str
    hosts: tuple[str, ...]
    num_hosts: int
    ssh_user: str | None
    ssh_key: str | None
    ssh_proxy_command: str | None
    programs: str
    token_file: Path | None

    @property
    def is_local(self) -> bool:
        return self.provider == OWN_MACHINES


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises ConfigError: file, key, value, what is expected."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {error}") from error
    try:
        return _described(path, _mapping(tree, "the file"))
    except _WrongError as error:
        raise ConfigError(f"{path}: {error}") from error


class _WrongError(Exception):
    """Key, value, what is expected."""


def _described(path: Path, tree: Mapping[str, Any]) -> ClusterFile:
    provider = _mapping(tree.get("provider"), "provider")
    kind = provider.get("type")
    auth = _mapping(tree.get("auth", {}), "auth")
    hosts = _hosts(provider) if kind == OWN_MACHINES else ()
    if hosts:
        _check_all_start(tree, len(hosts) - 1)
    if hosts and tree.get("docker"):
        raise _WrongError("docker: pointsman down stops no containers on machines of your own")
    return ClusterFile(
        path=path,
        name=_name(tree.get("cluster_name")),
        provider=str(kind),
        hosts=hosts,
        num_hosts=len(hosts) or _num_cloud_hosts(tree),
        ssh_user=auth.get("ssh_user"),
        ssh_key=auth.get("ssh_private_key"),
        ssh_proxy_command=auth.get("ssh_proxy_command"),
        programs=_programs(tree.get("head_start_ray_commands")),
        token_file=_token_file(_mapping(tree.get("file_mounts", {}), "file_mounts")),
    )


def _mapping(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _WrongError(f"{key} must be a mapping, got {value!r}")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise _WrongError(f"cluster_name {value!r}: letters, digits, - and _ are expected")
    return value


def _hosts(provider: Mapping[str, Any]) -> tuple[str, ...]:
    if "coordinator_address" in provider or "external_head_ip" in provider:
        raise _WrongError(
            "provider.coordinator_address, provider.external_head_ip: not supported; list the machines in "
            "head_ip and worker_ips, and run this command where it reaches all of them"
        )
    head, workers = provider.get("head_ip"), provider.get("worker_ips")
    if not isinstance(head, str) or not isinstance(workers, list):
        raise _WrongError(
            "provider: head_ip, an address, and worker_ips, a list of them, are expected"
        )
    hosts = (head, *map(str, workers))
    for host in hosts:
        if hosts.count(host) > 1:
            raise _WrongError(f"provider: {host} is listed more than once")
    return hosts


def _check_all_start(tree: Mapping[str, Any], num_workers: int) -> None:
    """Ray's defaults are all of them."""
    for key in ("min_workers", "max_workers"):
        if key in tree and tree[key] != num_workers:
            raise _WrongError(
                f"{key} {tree[key]!r}: all {num_workers} worker_ips are waited for; leave it out"
            )


def _num_cloud_hosts(tree: Mapping[str, Any]) -> int:
    kinds = _mapping(tree.get("available_node_types"), "available_node_types")
    return 1 + sum(int(_mapping(kind, name).get("min_workers", 0)) for name, kind in kinds.items())


def _programs(commands: object) -> str:
    for command in commands if isinstance(commands, list) else []:
        if (match := _RAY_START.search(str(command))) is not None:
            return match["folder"]
    raise _WrongError("head_start_ray_commands: a command with `ray start` is expected")


def _token_file(mounts: Mapping[str, Any]) -> Path | None:
    local = next((here for there, here in mounts.items() if there.endswith(_TOKEN)), None)
    return None if local is None else Path(str(local)).expanduser()
