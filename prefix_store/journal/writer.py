"""The thread that writes state files, so that the engine's loop never waits for a disk.

It wakes up after an entry has come, lets more come for a moment, and writes what there is. It computes names,
checksums and msgpack as well: all that the engine does for a block is to hand references over.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EFBIG, ENOSPC
from os import strerror

from cluster.log import logger
from prefix_store.journal.append_file import StateFile
from prefix_store.journal.directory import Kind, StateDirectory
from prefix_store.journal.entries import (
    BeginGeneration,
    CompleteSnapshot,
    Entry,
    RouteRun,
    ScoreRun,
)
from prefix_store.journal.records import BlockSizes, file_start, frame

GATHER_SECONDS = 0.02
"""From the first entry until it is written: what comes meanwhile is written with it."""
MAX_WAITING_BYTES = 2**26
"""Memory that entries keep which the disk has not taken."""
_FLUSH_BYTES = 2**18

_LOG = logger("journal")


@dataclass(frozen=True)
class WriterLimits:
    """max_bytes: of all files together. fsync_seconds: so long may what is written be unsynced; 0: not at all."""

    max_bytes: int
    fsync_seconds: float
    max_waiting_bytes: int = MAX_WAITING_BYTES
    gather_seconds: float = GATHER_SECONDS


@dataclass
class _Output:
    """One file and what has not been handed to the system yet."""

    file: StateFile
    buffer: bytearray = field(default_factory=bytearray)
    num_runs: int = 0
    """In the buffer."""
    is_synced: bool = False

    @property
    def size(self) -> int:
        return self.file.size + len(self.buffer)

    def flush(self) -> None:
        if self.buffer:
            self.file.append(self.buffer)
            self.buffer.clear()
            self.num_runs = 0
            self.is_synced = False

    def sync(self) -> None:
        self.flush()
        if not self.is_synced:
            self.file.sync()
            self.is_synced = True


class JournalWriter:
    """Owner of the open files. `put` and `close` are the engine's thread's; what is public beside them is written by
    this thread alone, and only read by others.

    After an error nothing is written until the next BeginGeneration, which tries again.
    """

    def __init__(
        self,
        directory: StateDirectory,
        sizes: BlockSizes,
        limits: WriterLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._sizes = sizes
        self._limits = limits
        self._clock = clock
        self._entries: deque[Entry] = deque()
        """Who puts something in sees to it that there is room."""
        self._bytes_put = self._num_handed = 0
        """By the engine's thread; the next by this one."""
        self._bytes_buffered = self._bytes_taken = self._num_done = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._journal: _Output | None = None
        self._snapshot: _Output | None = None
        self._generation = 0
        self._earlier_bytes = sum(file.size for file in directory.files())
        """Of complete files of earlier generations."""
        self._synced_at = clock()
        self.journal_bytes = 0
        """Of the journal that is written now."""
        self.file_bytes = self._earlier_bytes
        """Of all files."""
        self.num_lost = 0
        """Runs that were taken and not written."""
        self.num_snapshots = 0
        self.completed_generation = 0
        """The last with a whole snapshot."""
        self.failed_generation = 0
        """The last that met an error."""
        self.dropped_before = 0
        """Files of generations before this one are gone by command."""
        self.error = ""
        """Why not all is on disk that should be; empty again once it is."""
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return self._bytes_put - self._bytes_taken

    @property
    def has_room(self) -> bool:
        """For what can wait, so that what cannot still has some."""
        return self.waiting_bytes < self._limits.max_waiting_bytes // 2

    def has_room_for(self, run: RouteRun | ScoreRun) -> bool:
        return self.waiting_bytes + run.num_bytes(self._sizes) <= self._limits.max_waiting_bytes

    @property
    def is_busy(self) -> bool:
        """Something was handed over that is not written."""
        return self._num_handed != self._num_done

    def put(self, run: RouteRun | ScoreRun) -> None:
        """To be written; does not wait."""
        self._bytes_put += run.num_bytes(self._sizes)
        self._hand_over(run)

    def command(self, entry: BeginGeneration | CompleteSnapshot) -> None:
        """In its place among what was put."""
        self._hand_over(entry)

    def close(self, timeout_seconds: float) -> bool:
        """Writes and syncs what is there. False if that took longer: the thread goes on as long as the process does."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _hand_over(self, entry: Entry) -> None:
        self._num_handed += 1
        self._entries.append(entry)
        if not self._wake.is_set():
            self._wake.set()

    # --- the thread

    def _run(self) -> None:
        while True:
            self._wake.wait(self._seconds_to_sync())
            is_last = self._closing.is_set()
            if self._wake.is_set():
                self._wake.clear()
                self._closing.wait(self._limits.gather_seconds)
            num_taken = 0
            while self._entries:
                self._guarded(self._write_next)
                num_taken += 1
            self._guarded(self._flush)
            self._num_done += num_taken
            self._guarded(self._sync if is_last else self._sync_if_due)
            if is_last:
                self._close_files()
                return

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever fails at keeping state is no reason to stop serving."""
        try:
            work()
        except OSError as error:
            self._fail(error.strerror or str(error))
        except Exception as error:
            _LOG.exception("journal writer failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _write_next(self) -> None:
        entry = self._entries.popleft()
        match entry:
            case RouteRun() | ScoreRun():
                self._bytes_buffered += entry.num_bytes(self._sizes)
                self._write(entry)
            case BeginGeneration():
                self._begin(entry)
            case CompleteSnapshot():
                self._complete()

    def _write(self, run: RouteRun | ScoreRun) -> None:
        output = self._snapshot if run.of_snapshot else self._journal
        if output is None:
            self.num_lost += not run.of_snapshot
            return
        frames = b"".join([frame(record) for record in run.records(self._sizes)])
        if self._total_bytes + len(frames) > self._limits.max_bytes:
            self.num_lost += not run.of_snapshot
            raise OSError(EFBIG, f"the files would exceed {self._limits.max_bytes} bytes")
        output.buffer += frames
        output.num_runs += 1
        if len(output.buffer) > _FLUSH_BYTES:
            self._flush()

    def _begin(self, begin: BeginGeneration) -> None:
        self._guarded(self._sync)
        self._close_files()
        self._generation = begin.generation
        earlier = sum(file.size for file in self._directory.files())
        if begin.drops_earlier or earlier + begin.expected_bytes > self._limits.max_bytes:
            self._directory.remove_before(begin.generation)
            self.dropped_before, earlier = begin.generation, 0
        self._directory.remove_partial()
        self._earlier_bytes = earlier
        self._require_room(begin.expected_bytes)
        start = file_start(begin.header)
        self._journal = self._created("journal", start)
        if begin.with_snapshot:
            self._snapshot = self._created("snapshot", start)
        self._directory.sync()
        self._synced_at = self._clock()
        self._count()

    def _require_room(self, num_bytes: int) -> None:
        """A disk that is shared is not filled up once more with what will not fit."""
        free = self._directory.free_bytes()
        if free < num_bytes:
            raise OSError(ENOSPC, f"{strerror(ENOSPC)}: {free} bytes, a snapshot takes {num_bytes}")

    def _created(self, kind: Kind, start: bytes) -> _Output:
        output = _Output(self._directory.create(kind, self._generation))
        try:
            output.file.append(start)
            output.sync()
        except OSError:
            output.file.close()
            self._directory.discard(kind, self._generation)
            raise
        return output

    def _complete(self) -> None:
        if self._snapshot is None:
            return
        self._snapshot.sync()
        self._earlier_bytes = self._snapshot.size
        self._snapshot.file.close()
        self._snapshot = None
        self._sync()
        self._directory.complete(self._generation)
        self._directory.remove_before(self._generation)
        self.num_snapshots += 1
        self.completed_generation = self._generation
        self._count()
        if self.error:
            _LOG.info("state is whole again dir=%s", self._directory.path)
        self.error = ""

    def _flush(self) -> None:
        """What was handed over is the system's then, or lost."""
        try:
            for output in (self._journal, self._snapshot):
                if output is not None:
                    output.flush()
            self._count()
        finally:
            self._bytes_taken += self._bytes_buffered
            self._bytes_buffered = 0

    def _sync(self) -> None:
        """A snapshot is synced when it is complete: before that it does not count."""
        if self._journal is not None:
            self._journal.sync()
        self._synced_at = self._clock()

    def _sync_if_due(self) -> None:
        if self._seconds_to_sync() == 0:
            self._sync()

    def _seconds_to_sync(self) -> float | None:
        """None when there is nothing to sync."""
        if self._journal is None or self._journal.is_synced:
            return None
        return max(0.0, self._synced_at + self._limits.fsync_seconds - self._clock())

    def _fail(self, reason: str) -> None:
        if not self.error:
            _LOG.warning(
                "state is not written, serving goes on without dir=%s reason=%r",
                self._directory.path,
                reason,
            )
        self.error = reason
        self.failed_generation = self._generation
        self._close_files()

    def _close_files(self) -> None:
        """What is on disk stays, and what the disk still takes; a snapshot that is not complete goes."""
        if self._journal is not None:
            with suppress(OSError):
                self._journal.flush()
            self.num_lost += self._journal.num_runs
        for output in (self._journal, self._snapshot):
            if output is not None:
                output.file.close()
        if self._snapshot is not None:
            self._directory.discard("snapshot", self._generation)
        self._journal = self._snapshot = None

    @property
    def _total_bytes(self) -> int:
        outputs = (self._journal, self._snapshot)
        return self._earlier_bytes + sum(output.size for output in outputs if output is not None)

    def _count(self) -> None:
        self.journal_bytes = 0 if self._journal is None else self._journal.size
        self.file_bytes = self._total_bytes
