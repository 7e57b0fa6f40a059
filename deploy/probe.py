"""An actor that looks at its host before a cell starts there: versions, model, devices, who reaches whom."""

import contextlib
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path

import psutil
import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from cluster.errors import CheckpointError
from cluster.namespace import model_fingerprint
from deploy.preflight import HostFacts

CONNECT_SECONDS = 5.0
NONCE_BYTES = 16
DEVICE_SECONDS = 60.0


@dataclass(frozen=True)
class Listener:
    """Whoever connects is told `nonce`: an address that is another host's too (a bridge of containers) is found out."""

    address: str
    port: int
    nonce: bytes


class Probe:
    """Listens until the actor ends."""

    def __init__(self, address: str) -> None:
        """address: as Ray knows this host"""
        self._address = address

    def facts(self, model_dir: Path, ray_gpus: int) -> HostFacts:
        fingerprint, problem = _fingerprint(model_dir)
        owned = _addresses()
        return HostFacts(
            address=self._address,
            python=platform.python_version(),
            torch=_version("torch"),
            ray=ray.__version__,
            pointsman=_version("pointsman") or "of no known version",
            model_fingerprint=fingerprint,
            model_problem=problem,
            interface=owned.get(self._address),
            addresses=tuple(sorted(a for a in owned if a != self._address and _is_outside(a))),
            ray_gpus=ray_gpus,
            visible_gpus=_visible_gpus() if ray_gpus else 0,
            memory_bytes=psutil.virtual_memory().total,
            has_token_auth=bool(is_token_auth_enabled()),
        )

    def listen(self) -> Listener:
        """On the address that Ray knows, as gloo will. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        server = socket.create_server((self._address, 0), family=family, backlog=128)
        nonce = secrets.token_bytes(NONCE_BYTES)
        threading.Thread(target=greet_all, args=(server, nonce), daemon=True).start()
        return Listener(self._address, server.getsockname()[1], nonce)

    def unreached(self, listeners: Mapping[str, Listener]) -> dict[str, str]:
        """Why, by name, those are not reached that are not. All are tried at once."""
        reasons: dict[str, str] = {}
        threads = [
            threading.Thread(target=_try, args=(name, listener, reasons), daemon=True)
            for name, listener in listeners.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return reasons


def greet_all(server: socket.socket, nonce: bytes) -> None:
    """Endless. A peer that is gone already, or a scan of ports, ends nobody else's greeting."""
    with server:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(nonce)


def _try(name: str, listener: Listener, reasons: dict[str, str]) -> None:
    try:
        place = (listener.address, listener.port)
        with socket.create_connection(place, timeout=CONNECT_SECONDS) as connection:
            told = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        reasons[name] = f"port {listener.port}: {error.strerror or error}"
        return
    if told != listener.nonce:
        reasons[name] = f"port {listener.port}: another host answered"


def _fingerprint(model_dir: Path) -> tuple[str | None, str | None]:
    """Of the content alone, whatever dtype it is served in; or the problem."""
    if not model_dir.is_dir():
        return None, f"there is no model directory {model_dir}"
    try:
        return model_fingerprint(model_dir, "as stored"), None
    except CheckpointError as error:
        return None, str(error)


def _addresses() -> dict[str, str]:
    """Interface by IP address."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _is_outside(address: str) -> bool:
    parsed = ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _visible_gpus() -> int:
    """In a process of its own: Ray hides the GPUs from an actor that has asked for none."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    count = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        env=environment, capture_output=True, text=True, timeout=DEVICE_SECONDS,
    )  # fmt: skip
    return int(count.stdout) if count.returncode == 0 else 0
