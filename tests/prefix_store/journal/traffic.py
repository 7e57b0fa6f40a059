"""Random requests to a store: sequences that share beginnings, some held for a while, with scores, at times with other
experts."""

import random
import zlib

import numpy as np

from cluster.scores import TokenScores
from cluster.types import Namespace
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import BLOCK_SIZE, RANK0, TokenIds, Written, finish, gates, write

NAMESPACES = [Namespace("a"), Namespace("b")]
MAX_BLOCKS = 6
MAX_HELD = 2


class Traffic:
    """Owner of the requests that are held."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sequences: list[tuple[Namespace, TokenIds]] = []
        """All that were ever published."""
        self.blocks: set[tuple[Namespace, bytes]] = set()
        """Theirs, by namespace and tokens up to the end."""
        self._held: list[Written] = []

    def run(self, store: PrefixStore, num_requests: int) -> None:
        for _ in range(num_requests):
            self.request(store)

    def request(self, store: PrefixStore) -> None:
        namespace, token_ids = self.random.choice(NAMESPACES), self._sequence()
        self.sequences.append((namespace, token_ids))
        num_blocks = len(token_ids) // BLOCK_SIZE
        ends = range(BLOCK_SIZE, num_blocks * BLOCK_SIZE + 1, BLOCK_SIZE)
        self.blocks |= {(namespace, token_ids[:end].tobytes()) for end in ends}
        cached = store.match(namespace, token_ids).num_kv_tokens[RANK0] // BLOCK_SIZE
        variants = frozenset(
            block for block in range(cached, num_blocks) if self.random.random() < 0.1
        )
        routes = gates(token_ids, cached, num_blocks, variants=variants)
        written = write(store, token_ids, namespace=namespace, routes=routes)
        if self.random.random() < 0.5:
            self._score(store, written, namespace, token_ids)
        self._held.append(written)
        while len(self._held) > self.random.randint(0, MAX_HELD):
            finish(store, self._held.pop(0))

    def end(self, store: PrefixStore) -> None:
        while self._held:
            finish(store, self._held.pop())

    def _score(
        self, store: PrefixStore, written: Written, namespace: Namespace, token_ids: TokenIds
    ) -> None:
        start = self.random.randint(0, written.lease.num_tokens)
        end = self.random.randint(start, written.lease.num_tokens)
        store.record_scores(written.lease, start, scores_of(namespace, token_ids, start, end))

    def _sequence(self) -> TokenIds:
        """Some earlier one's beginning, and blocks of a small alphabet."""
        base = self.random.choice(self.sequences)[1] if self.sequences else np.zeros(0, np.int32)
        base = base[: self.random.randint(0, len(base))]
        own = [self.random.randrange(2) for _ in range(self.random.randint(1, 3 * BLOCK_SIZE))]
        joined = np.concatenate([base, np.array(own, np.int32)])
        return joined[: MAX_BLOCKS * BLOCK_SIZE].astype(np.int32)


def scores_of(namespace: Namespace, token_ids: TokenIds, start: int, end: int) -> TokenScores:
    """A function of the prefix."""
    scores = TokenScores.unknown(end - start)
    for place in range(end - start):
        digest = zlib.crc32(namespace.encode() + token_ids[: start + place + 1].tobytes())
        scores.rows[place] = -(digest % 1000) / 8, 1 + digest % 7, digest % 97, -(digest % 10) / 8
    return scores
