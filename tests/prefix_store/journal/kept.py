"""Builders for tests of what a store keeps on disk: stores over a directory, their content, a disk that gets full."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cluster.prefix_match import StateOnDisk
from cluster.scores import SCORE_BYTES, TokenScores
from cluster.types import Namespace
from prefix_store.evictor import Evictor
from prefix_store.journal.append_file import AppendFile
from prefix_store.journal.directory import StateDirectory
from prefix_store.journal.journal import Journal
from prefix_store.journal.loading import find_kept
from prefix_store.journal.records import BlockSizes, Header
from prefix_store.journal.restoring import RestoredTree
from prefix_store.journal.writer import WriterLimits
from prefix_store.radix_tree import RadixTree, path_from_root
from prefix_store.size_account import SizeAccount
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    KV_BYTES_PER_BLOCK,
    NAMESPACE,
    SHAPE,
    TokenIds,
    insert,
    route_block_bytes,
)

FINGERPRINT = "weights"
SIZES = BlockSizes.of(BLOCK_SIZE, SHAPE)
PATIENCE = 20.0
Content = dict[tuple[Namespace, bytes], tuple[bytes, bytes, bytes | None]]
"""Ids, weights and scores of a block, by namespace and tokens up to its end."""


def limits(**changes: float) -> WriterLimits:
    defaults = {"max_bytes": 2**24, "fsync_seconds": 3600.0, "gather_seconds": 0.0}
    return WriterLimits(**(defaults | changes))  # type: ignore[arg-type]  # ints are among them


def header(
    fingerprint: str = FINGERPRINT, numerics: str = "fast", block_size: int = BLOCK_SIZE
) -> Header:
    return Header.of(fingerprint, numerics, block_size, SHAPE)


class FullDisk:
    """Takes so many further bytes, and then none."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path) -> "FileOnFullDisk":
        return FileOnFullDisk(path, self)


class FileOnFullDisk(AppendFile):
    def __init__(self, path: Path, disk: FullDisk) -> None:
        super().__init__(path)
        self._disk = disk

    def append(self, data: bytes | bytearray) -> None:
        if len(data) > self._disk.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.room -= len(data)
        super().append(data)


class FlakyDisk:
    """Fails now and then, at whatever it is asked for, until it is healed."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.share = 0.0
        """Of calls that fail."""
        self.num_failures = 0

    def open(self, path: Path) -> "FileOnFlakyDisk":
        self.may_fail()
        return FileOnFlakyDisk(path, self)

    def may_fail(self) -> None:
        if self._random.random() < self.share:
            self.num_failures += 1
            raise OSError(errno.EIO, "Input/output error")


class FileOnFlakyDisk(AppendFile):
    def __init__(self, path: Path, disk: FlakyDisk) -> None:
        super().__init__(path)
        self._disk = disk

    def append(self, data: bytes | bytearray) -> None:
        self._disk.may_fail()
        super().append(data)

    def sync(self) -> None:
        self._disk.may_fail()
        super().sync()


@dataclass
class Clock:
    """Stands still, or goes on by `tick` with every look."""

    now: float = 1000.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def open_store(
    path: Path,
    *,
    max_route_blocks: int = 64,
    max_score_blocks: int = 64,
    num_kv_blocks: int = 32,
    fingerprint: str = FINGERPRINT,
    writer: WriterLimits | None = None,
    open_file: Callable[[Path], AppendFile] = AppendFile,
    clock: Callable[[], float] = time.monotonic,
) -> PrefixStore:
    """One rank; what the directory has is loaded."""
    directory = StateDirectory(path, open_file=open_file)
    journal = Journal(directory, header(fingerprint), SIZES, writer or limits(), clock=clock)
    store = PrefixStore(
        num_ranks=1,
        num_kv_blocks=num_kv_blocks,
        block_size=BLOCK_SIZE,
        route_shape=SHAPE,
        route_budget_bytes=max_route_blocks * route_block_bytes(),
        score_budget_bytes=max_score_blocks * BLOCK_SIZE * SCORE_BYTES,
        kv_bytes_per_block=KV_BYTES_PER_BLOCK,
        journal=journal,
    )
    store.load()
    return store


def state_of(store: PrefixStore) -> StateOnDisk:
    state = store.stats().state
    assert state is not None
    return state


def settle(store: PrefixStore, clock: Clock | None = None) -> None:
    """Until the journal has nothing left to do. A clock that stands still goes on as far as the journal waits."""
    deadline = time.monotonic() + PATIENCE
    while (seconds := store.upkeep()) is not None:
        assert time.monotonic() < deadline, state_of(store)
        time.sleep(min(seconds, 0.002))
        if clock is not None:
            clock.now += seconds


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def close(store: PrefixStore) -> None:
    store.close(PATIENCE)


def held(store: PrefixStore, sequences: list[tuple[Namespace, TokenIds]]) -> Content:
    """What a store answers for these sequences."""
    content: Content = {}
    for namespace, token_ids in sequences:
        match = store.match(namespace, token_ids)
        lease = store.acquire(namespace, token_ids, match.num_route_tokens)
        for end in range(BLOCK_SIZE, match.num_route_tokens + 1, BLOCK_SIZE):
            start = end - BLOCK_SIZE
            routes, scores = store.routes(lease, start, end), store.scores(lease, start, end)
            content[namespace, token_ids[:end].tobytes()] = (
                routes.topk_ids.tobytes(),
                routes.topk_weights.tobytes(),
                _row(scores),
            )
        store.release(lease)
    return content


def on_disk(path: Path, *, max_route_blocks: int = 10**6, max_score_blocks: int = 10**6) -> Content:
    """What a start would load, without starting anything."""
    directory = StateDirectory(path)
    kept = find_kept(directory, header(), SIZES)
    kept.keep_newest(max_route_blocks, max_score_blocks)
    tree, account = RadixTree(BLOCK_SIZE), SizeAccount(1)
    RestoredTree(tree, account, Evictor(tree, [], account)).fill(kept)
    directory.close()
    content = _content(tree)
    assert account.routes.unleased == len(content)
    return content


def _content(tree: RadixTree) -> Content:
    content: Content = {}
    for node in tree.nodes_bottom_up():
        tokens = b"".join([part.edge for part in path_from_root(node)])
        for place in range(node.num_blocks):
            end = (node.first_block + place + 1) * SIZES.tokens
            content[node.namespace, tokens[:end]] = (
                node.payload.routes.topk_ids[place],
                node.payload.routes.topk_weights[place],
                node.payload.scores.get(place),
            )
    return content


def _row(scores: TokenScores) -> bytes | None:
    return scores.rows.tobytes() if scores.known.any() else None


def num_routes(path: Path, token_ids: TokenIds) -> int:
    """Tokens of a sequence that a start would find."""
    found = on_disk(path)
    ends = range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)
    return BLOCK_SIZE * sum((NAMESPACE, token_ids[:end].tobytes()) in found for end in ends)


def kept_file(path: Path, *sequences: TokenIds) -> Path:
    """A directory whose one journal has these sequences."""
    store = open_store(path)
    for token_ids in sequences:
        insert(store, token_ids)
    close(store)
    (file,) = path.glob("journal-*")
    return file


def is_prefix_closed(content: Content) -> bool:
    return all(
        len(tokens) == SIZES.tokens or (namespace, tokens[: -SIZES.tokens]) in content
        for namespace, tokens in content
    )
