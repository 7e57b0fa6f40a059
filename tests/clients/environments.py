"""Environments of clients: a virtual environment each, and one folder for each that comes from npm.

They are kept between runs and made anew when a client's packages or the interpreter have changed.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.clients.catalogue import Client

REPOSITORY = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drivers"
INSTALL_SECONDS = 1200.0
"""A client with PyTorch on a slow network."""


class InstallFailed(Exception):
    """The registry or the installer said no."""


class ToolMissing(Exception):
    """This machine has no such program."""


@dataclass(frozen=True)
class Environment:
    """What runs a client's driver, and where."""

    command: tuple[str, ...]
    directory: Path


def environment_of(client: Client, root: Path) -> Environment:
    """Installs what is not installed yet. Raises InstallFailed and ToolMissing."""
    directory = root.absolute() / client.driver.rpartition(".")[0]
    install, interpreter = {
        "pypi": (_install_from_pypi, sys.executable),
        "npm": (_install_from_npm, "node"),
    }[client.registry]
    program = shutil.which(interpreter)
    if program is None:
        raise ToolMissing(f"no {interpreter} on this machine")
    stamp = directory / ".installed"
    wanted = "\n".join([program, sys.version, *client.packages])
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        install(client, directory)
        stamp.write_text(wanted)
    runs = str(directory / "bin" / "python") if client.registry == "pypi" else program
    return Environment((runs, str(DRIVERS / client.driver)), directory)


def _install_from_pypi(client: Client, directory: Path) -> None:
    _run([sys.executable, "-m", "venv", str(directory)], directory)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    _run([*pip, "-c", str(REPOSITORY / "constraints-cpu.txt"), *client.packages], directory)


def _install_from_npm(client: Client, directory: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ToolMissing("no npm on this machine")
    (directory / "package.json").write_text("{}")
    _run([npm, "install", "--no-audit", "--no-fund", "--save-exact", *client.packages], directory)


def _run(command: list[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallFailed(f"{command[0]}: not within {INSTALL_SECONDS:.0f} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise InstallFailed(f"{' '.join(command)}: {' '.join(last)}")
