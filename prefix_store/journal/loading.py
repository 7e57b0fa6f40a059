"""What the files of a state directory amount to: which blocks, under which parents, and which of them are kept."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cluster.log import logger
from cluster.types import Namespace
from prefix_store.journal.block_index import BlockIndex, KeptRun, Place, newest
from prefix_store.journal.directory import StateDirectory, StatePath
from prefix_store.journal.records import (
    BlockSizes,
    Header,
    RecordReader,
    RoutesRecord,
    ScoresRecord,
    file_start,
    read_header,
    read_record,
)
from prefix_store.packed_routes import PackedRoutes

_LOG = logger("journal")


@dataclass(frozen=True)
class LoadedRun:
    """What a kept run is made of. parent: the number of the block above, None where the run begins a sequence."""

    namespace: Namespace | None
    """Where there is no parent."""
    parent: int | None
    first: int
    edge: bytes
    routes: PackedRoutes
    stamp: int
    """Of the last use of the first block, which no later one was used after."""


class KeptBlocks:
    """What was found, and what of it is to be loaded. The files must stay as they are until it is."""

    def __init__(self, files: list[StatePath], sizes: BlockSizes) -> None:
        self.files = files
        self.num_bytes = 0
        self.index = BlockIndex(sizes)
        self._sizes = sizes
        self._kept: list[bool] = []
        self._used: list[int] = []
        self._scored: list[int] = []
        self.num_route_blocks = 0

    @property
    def num_found(self) -> int:
        return len(self.index.names)

    @property
    def num_score_blocks(self) -> int:
        return len(self._scored)

    @property
    def last_stamp(self) -> int:
        return max(self.index.stamps, default=0)

    def keep_newest(self, max_route_blocks: int, max_score_blocks: int) -> None:
        index = self.index
        lives = index.lives()
        used = index.last_uses(lives)
        self._kept, self._used = newest(lives, used, max_route_blocks).tolist(), used.tolist()
        self.num_route_blocks = sum(self._kept)
        scored = [block for block in index.scores if self._kept[block]]
        scored.sort(key=lambda block: -index.scores[block][2])
        self._scored = scored[:max_score_blocks]

    def route_runs(self) -> Iterator[LoadedRun]:
        """Parents before children. Raises OSError."""
        max_payload = self._sizes.max_payload
        with _OpenFiles(self.files) as files:
            for run in self.index.runs:
                end = run.first
                while end < run.first + run.num_blocks and self._kept[end]:
                    end += 1
                if end > run.first:
                    record = read_record(files[run.place.file], run.place.start, max_payload)
                    assert isinstance(record, RoutesRecord)
                    yield self._loaded(record, run, end)

    def score_rows(self) -> Iterator[tuple[int, bytes]]:
        """By number of the block. Raises OSError."""
        by_record: dict[Place, list[tuple[int, int]]] = {}
        for block in self._scored:
            place, number, _ = self.index.scores[block]
            by_record.setdefault(place, []).append((block, number))
        size, max_payload = self._sizes.scores, self._sizes.max_payload
        with _OpenFiles(self.files) as files:
            for place, blocks in by_record.items():
                record = read_record(files[place.file], place.start, max_payload)
                assert isinstance(record, ScoresRecord)
                for block, number in blocks:
                    yield block, record.rows[number * size : (number + 1) * size]

    def _loaded(self, record: RoutesRecord, run: KeptRun, end: int) -> LoadedRun:
        parent = self.index.parents[run.first]
        start, stop = run.skipped, run.skipped + end - run.first
        ids, weights = self._sizes.topk_ids, self._sizes.topk_weights
        return LoadedRun(
            namespace=Namespace(record.namespace) if parent < 0 else None,
            parent=None if parent < 0 else parent,
            first=run.first,
            edge=record.tokens[start * self._sizes.tokens : stop * self._sizes.tokens],
            routes=PackedRoutes(
                [record.topk_ids[i * ids : (i + 1) * ids] for i in range(start, stop)],
                [record.topk_weights[i * weights : (i + 1) * weights] for i in range(start, stop)],
            ),
            stamp=self._used[run.first],
        )


def find_kept(directory: StateDirectory, header: Header, sizes: BlockSizes) -> KeptBlocks:
    """Reads all files that are this model's: the last complete snapshot and the journals from then on. Cuts off what is
    damaged, sets aside what is not ours, and removes what an earlier snapshot left. Raises OSError."""
    directory.remove_partial()
    directory.undo_setting_aside()
    files = _usable(directory, header)
    snapshots = [file.generation for file in files if not file.is_journal]
    if snapshots:
        directory.remove_before(max(snapshots))
        files = [file for file in files if file.generation >= max(snapshots)]
    kept = KeptBlocks(files, sizes)
    for number, file in enumerate(files):
        kept.num_bytes += _read(directory, file, number, kept.index)
    return kept


def _usable(directory: StateDirectory, header: Header) -> list[StatePath]:
    ours, foreign = [], []
    for file in directory.files():
        if _is_begun(file.path, header):
            os.unlink(file.path)
            continue
        with file.path.open("rb") as stream:
            found = read_header(stream)
        if found == header:
            ours.append(file)
            continue
        foreign.append(file.path)
        _LOG.warning("state set aside file=%s reason=%r", file.path, _difference(found, header))
    returning = [] if ours else _of_ours(directory.files_aside(), header)
    if foreign or returning:
        directory.set_aside(foreign, returning)
    if returning:
        _LOG.info("state that was set aside is taken back files=%d", len(returning))
        return _usable(directory, header)
    return ours


def _of_ours(files: list[Path], header: Header) -> list[Path]:
    """A cell of this model was here before another one was, which may have left nothing. A file that cannot be read is
    nobody's."""
    ours = []
    for file in files:
        with suppress(OSError), file.open("rb") as stream:
            if read_header(stream) == header:
                ours.append(file)
    return ours


def _is_begun(path: Path, header: Header) -> bool:
    """A file whose start was not even written to its end holds nothing."""
    start = file_start(header)
    content = path.read_bytes() if path.stat().st_size < len(start) else None
    return content is not None and start.startswith(content)


def _difference(found: Header | None, header: Header) -> str:
    if found is None:
        return "not a state file of this version, or damaged at its start"
    for name in Header.__struct_fields__:
        theirs, ours = getattr(found, name), getattr(header, name)
        if theirs != ours:
            return f"its {name} is {theirs!r}, that of this cell is {ours!r}"
    raise AssertionError("the headers are equal")


def _read(directory: StateDirectory, file: StatePath, number: int, index: BlockIndex) -> int:
    """Returns how many bytes of it are whole."""
    with file.path.open("rb") as stream:
        read_header(stream)
        reader = RecordReader(stream, index.sizes)
        for start, record in reader:
            place = Place(number, start)
            if isinstance(record, RoutesRecord):
                index.add_routes(record, place)
            else:
                index.add_scores(record, place)
    excess = file.size - reader.end
    if excess:
        _LOG.warning("torn tail cut file=%s at=%d bytes=%d", file.path, reader.end, excess)
        directory.cut(file.path, reader.end)
    return reader.end


class _OpenFiles:
    """All files of a state, open to be read, closed at the end."""

    def __init__(self, files: list[StatePath]) -> None:
        self._paths = [file.path for file in files]
        self._streams: list[BinaryIO] = []

    def __enter__(self) -> list[BinaryIO]:
        for path in self._paths:
            self._streams.append(path.open("rb"))
        return self._streams

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()
