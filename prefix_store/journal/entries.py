"""What the engine hands to the writer's thread: bytes that nobody changes any more, and nothing computed of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cluster.types import Namespace
from prefix_store.journal.block_names import block_names
from prefix_store.journal.records import BlockSizes, Header, RoutesRecord, ScoresRecord


class RouteRun(NamedTuple):
    """Routes of the blocks of a sequence from `first_block` on, one bytes object per block and column."""

    namespace: Namespace
    tokens: bytes
    """The sequence from its start, at least to the end of the run."""
    first_block: int
    topk_ids: list[bytes]
    topk_weights: list[bytes]
    stamp: int
    of_snapshot: bool

    def num_bytes(self, sizes: BlockSizes) -> int:
        """That it keeps in memory."""
        return len(self.tokens) + len(self.topk_ids) * sizes.routes

    def records(self, sizes: BlockSizes) -> Iterator[RoutesRecord]:
        first, end = self.first_block, self.first_block + len(self.topk_ids)
        above = min(first, 1)
        names = block_names(self.namespace, self.tokens, sizes.tokens, first - above, end)
        parent = names.pop(0) if above else b""
        for start in range(0, len(names), step := sizes.route_blocks_per_record):
            stop = start + step
            of_part = names[start:stop]
            place = (first + start) * sizes.tokens
            yield RoutesRecord(
                stamp=self.stamp,
                namespace="" if parent else self.namespace,
                parent=parent,
                names=b"".join(of_part),
                tokens=self.tokens[place : place + len(of_part) * sizes.tokens],
                topk_ids=b"".join(self.topk_ids[start:stop]),
                topk_weights=b"".join(self.topk_weights[start:stop]),
            )
            parent = of_part[-1]


class ScoreRun(NamedTuple):
    """Scores of some blocks of a sequence, ascending."""

    namespace: Namespace
    tokens: bytes
    """The sequence from its start, at least to the end of the last block."""
    blocks: list[int]
    rows: list[bytes]
    stamp: int
    of_snapshot: bool

    def num_bytes(self, sizes: BlockSizes) -> int:
        """That it keeps in memory."""
        return len(self.tokens) + len(self.rows) * sizes.scores

    def records(self, sizes: BlockSizes) -> Iterator[ScoresRecord]:
        first, end = self.blocks[0], self.blocks[-1] + 1
        names = block_names(self.namespace, self.tokens, sizes.tokens, first, end)
        of_blocks = [names[block - first] for block in self.blocks]
        for start in range(0, len(of_blocks), step := sizes.score_blocks_per_record):
            stop = start + step
            yield ScoresRecord(
                self.stamp, b"".join(of_blocks[start:stop]), b"".join(self.rows[start:stop])
            )


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """What follows goes into files of this generation."""

    generation: int
    header: Header
    drops_earlier: bool
    """What is on disk goes first, for good."""
    with_snapshot: bool
    """A snapshot follows, and then its CompleteSnapshot; until then the files before it count."""
    expected_bytes: int
    """Of the snapshot."""


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """Everything that the snapshot holds has been handed over."""


Entry = RouteRun | ScoreRun | BeginGeneration | CompleteSnapshot
