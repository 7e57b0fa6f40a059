"""A cell's state directory: its lock, the names of its files, and what becomes of files of something else.

lock                   held by the cell that writes here; gone with its process
snapshot-7.state       everything that the store held when journal 7 began, or later
journal-7.state        what was published from then on
snapshot-8.partial     being written
set-aside/             the last files that were another model's, or unreadable: never read
set-aside.going/       files on their way there
set-aside.returning/   files on their way back
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.errors import ConfigError
from prefix_store.journal.append_file import AppendFile, StateFile

Kind = Literal["snapshot", "journal"]
OpenFile = Callable[[Path], StateFile]
_NAME = re.compile(r"(snapshot|journal)-(\d{1,18})\.(state|partial)", re.ASCII)
_LOCK = "lock"
_SET_ASIDE = "set-aside"
_GOING, _RETURNING = f"{_SET_ASIDE}.going", f"{_SET_ASIDE}.returning"


@dataclass(frozen=True, order=True)
class StatePath:
    """A complete file; sorted as they are read: a snapshot before the journal that began with it."""

    generation: int
    is_journal: bool
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size


class StateDirectory:
    """Owner of the lock and of every file in the directory."""

    def __init__(self, path: Path, *, open_file: OpenFile = AppendFile) -> None:
        """Makes the directory if there is none, for its owner alone. Raises ConfigError if it cannot be used, or is
        in use."""
        self.path = path
        self._open_file = open_file
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(f"--state-dir {path}: is not a directory") from error
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: {error.strerror}") from error
        try:
            self._lock = _locked(path)
            self._check_readable()
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: {error.strerror}") from error

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock)

    def files(self) -> list[StatePath]:
        """Complete ones, in the order in which they are to be read. Raises OSError."""
        found = []
        for name in os.listdir(self.path):
            match = _NAME.fullmatch(name)
            if match is not None and match[3] == "state":
                found.append(StatePath(int(match[2]), match[1] == "journal", self.path / name))
        return sorted(found)

    def create(self, kind: Kind, generation: int) -> StateFile:
        """An empty file; a snapshot is not complete before `complete` says so. Raises OSError."""
        return self._open_file(self._written(kind, generation))

    def discard(self, kind: Kind, generation: int) -> None:
        """A file that is not complete, as far as the disk lets it go."""
        with contextlib.suppress(OSError):
            os.unlink(self._written(kind, generation))

    def complete(self, generation: int) -> None:
        """The snapshot of this generation, whose content is on disk, counts from now on. Raises OSError."""
        os.rename(self._written("snapshot", generation), self.path / f"snapshot-{generation}.state")
        self.sync()

    def remove_partial(self) -> None:
        """Snapshots that nobody completes any more. Raises OSError."""
        for name in os.listdir(self.path):
            if (match := _NAME.fullmatch(name)) is not None and match[3] == "partial":
                os.unlink(self.path / name)

    def remove_before(self, generation: int) -> None:
        """Every file of earlier generations, for good. Raises OSError."""
        self.remove_partial()
        for file in self.files():
            if file.generation < generation:
                os.unlink(file.path)
        self.sync()

    def cut(self, path: Path, size: int) -> None:
        """Takes what is behind `size` off a file. Raises OSError."""
        with path.open("r+b") as stream:
            stream.truncate(size)
            os.fsync(stream.fileno())

    def files_aside(self) -> list[Path]:
        """What was set aside last. Raises OSError."""
        return _state_files(self.path / _SET_ASIDE)

    def newest_generation_aside(self) -> int:
        """Of what was set aside last: whoever is here now numbers its files from the next, so that none that moves
        ever meets one of its name. 0 where nothing was. Raises OSError."""
        names = (_NAME.fullmatch(file.name) for file in self.files_aside())
        return max((int(name[2]) for name in names if name), default=0)

    def set_aside(self, files: list[Path], returning: Sequence[Path] = ()) -> None:
        """Out of the way of this cell, in the place of what was set aside before, some of which returns. Raises
        OSError."""
        place, going, back = (self.path / name for name in (_SET_ASIDE, _GOING, _RETURNING))
        going.mkdir(mode=0o700)
        for file in files:
            os.rename(file, going / file.name)
        if returning:
            os.rename(place, back)
            for file in returning:
                os.rename(back / file.name, self.path / file.name)
            shutil.rmtree(back, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(going, place)
        self.sync()

    def undo_setting_aside(self) -> None:
        """Of a process that ended in the middle of it: all that was on its way is here again. Raises OSError."""
        for place in (self.path / _GOING, self.path / _RETURNING):
            for file in _state_files(place):
                if not (self.path / file.name).exists():
                    os.rename(file, self.path / file.name)
            shutil.rmtree(place, ignore_errors=True)

    def sync(self) -> None:
        """Names that were given and taken are on disk. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self) -> int:
        """What the file system has left for us. Raises OSError."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def _written(self, kind: Kind, generation: int) -> Path:
        return self.path / f"{kind}-{generation}.{'partial' if kind == 'snapshot' else 'state'}"

    def _check_readable(self) -> None:
        try:
            for file in self.files():
                with file.path.open("rb"):
                    pass
        except OSError:
            self.close()
            raise


def check_state_directory(path: Path) -> None:
    """Raises ConfigError as a cell that starts here would, and leaves the directory made."""
    StateDirectory(path).close()


def _state_files(place: Path) -> list[Path]:
    """Complete ones, whatever else somebody has put there. Raises OSError."""
    if not place.is_dir():
        return []
    matches = ((file, _NAME.fullmatch(file.name)) for file in sorted(place.iterdir()))
    return [file for file, match in matches if match and match[3] == "state" and file.is_file()]


def _locked(path: Path) -> int:
    """The descriptor that holds the lock. Raises OSError, ConfigError if another process has it."""
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise ConfigError(
            f"--state-dir {path}: the cell of process {holder or '?'} keeps its state there; give "
            "each cell a directory of its own"
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    with contextlib.suppress(OSError):  # a full disk; the number only helps whoever is refused
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
