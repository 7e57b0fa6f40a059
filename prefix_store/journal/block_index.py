"""Which blocks a heap of records amounts to, and which of them are the last used: pure, no files in here."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefix_store.journal.records import NAME_BYTES, BlockSizes, RoutesRecord, ScoresRecord

Mask = npt.NDArray[np.bool_]
Stamps = npt.NDArray[np.int64]

_NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Of a record: number of the file, first byte."""

    file: int
    start: int


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Blocks [first, first + n) by number that one record brings, its blocks from `skipped` on."""

    place: Place
    first: int
    num_blocks: int
    skipped: int


@dataclass
class BlockIndex:
    """Blocks numbered as they come, parents first. Pure: records in, decisions out.

    A name that comes again is the same block if its parent is and its experts are, and was used again. Else the block
    has had a second life, in which none of the first one's children lives: their routes followed other ones.
    """

    sizes: BlockSizes
    names: dict[bytes, int] = field(default_factory=dict)
    """The last life of each."""
    parents: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    """A hash of the ids, with this process's own key."""
    dead: set[int] = field(default_factory=set)
    runs: list[KeptRun] = field(default_factory=list)
    scores: dict[int, tuple[Place, int, int]] = field(default_factory=dict)
    """By block: the record, its number in there, the stamp."""

    def add_routes(self, record: RoutesRecord, place: Place) -> None:
        parent = self.names.get(record.parent) if record.parent else _NO_PARENT
        if parent is None:  # a record before it was never written
            return
        names, experts = _names(record.names), self._experts(record)
        skipped = 0
        while skipped < len(names):
            known = self.names.get(names[skipped])
            if known is None or not self._is_same(known, parent, experts[skipped]):
                break
            self.stamps[known] = max(self.stamps[known], record.stamp)
            parent, skipped = known, skipped + 1
        if skipped < len(names):
            first = len(self.parents)
            self.runs.append(KeptRun(place, first, len(names) - skipped, skipped))
            self._add(names[skipped:], experts[skipped:], parent, record.stamp)

    def add_scores(self, record: ScoresRecord, place: Place) -> None:
        for number, name in enumerate(_names(record.names)):
            block = self.names.get(name)
            if block is not None:
                self.scores[block] = place, number, record.stamp

    def lives(self) -> Mask:
        """[blocks]"""
        lives: list[bool] = []
        for number, parent in enumerate(self.parents):
            lives.append(number not in self.dead and (parent < 0 or lives[parent]))
        return np.array(lives, np.bool_)

    def last_uses(self, lives: Mask) -> Stamps:
        """[blocks]: of the block or of any living one below it, so that none is older than its children."""
        used, living = self.stamps.copy(), lives.tolist()
        for number in range(len(used) - 1, -1, -1):
            parent = self.parents[number]
            if parent >= 0 and living[number] and used[number] > used[parent]:
                used[parent] = used[number]
        return np.array(used, np.int64)

    def _is_same(self, known: int, parent: int, experts: int) -> bool:
        return self.parents[known] == parent and self.experts[known] == experts

    def _add(self, names: list[bytes], experts: list[int], parent: int, stamp: int) -> None:
        for name, ids in zip(names, experts, strict=True):
            number = len(self.parents)
            if (earlier := self.names.get(name)) is not None:
                self.dead.add(earlier)
            self.names[name] = number
            self.parents.append(parent)
            self.stamps.append(stamp)
            self.experts.append(ids)
            parent = number

    def _experts(self, record: RoutesRecord) -> list[int]:
        size, ids = self.sizes.topk_ids, record.topk_ids
        return [hash(ids[start : start + size]) for start in range(0, len(ids), size)]


def newest(lives: Mask, used: Stamps, max_blocks: int) -> Mask:
    """[blocks]: whether it is among the last used that live; whoever is has its parent there."""
    numbers = np.flatnonzero(lives)
    order = numbers[np.lexsort((numbers, -used[numbers]))]
    kept = np.zeros(len(lives), np.bool_)
    kept[order[:max_blocks]] = True
    return kept


def _names(joined: bytes) -> list[bytes]:
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]
