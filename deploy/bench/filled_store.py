"""A prefix store as full as its budgets allow, with the traffic that filled it and the prompts that hit a hot prefix.

Everything is drawn from one seed. No clock in here.
"""

import numpy as np
import numpy.typing as npt

from cluster.prefix_match import Publication
from cluster.routes import ExpertRoutes, RouteShape
from cluster.scores import SCORE_BYTES, TokenScores
from cluster.types import BlockId, Namespace, Rank
from prefix_store.journal.store_journal import StoreJournal
from prefix_store.store import PrefixStore

Int32Array = npt.NDArray[np.int32]

NAMESPACE = Namespace("bench")
BLOCK_SIZE = 16
SHAPE = RouteShape(num_moe_layers=4, num_experts_per_tok=4, num_experts=64)
"""Of the demo model: 80 bytes of routes per token, 1,280 per block, 1.3 GB in a million blocks."""
PROMPT_TOKENS = 4000
SHARED_TOKENS = 3500
SHARED_BLOCKS = SHARED_TOKENS // BLOCK_SIZE
OWN_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE - SHARED_BLOCKS
PATH_NODES = 12
"""Nodes that the shared blocks lie in: other prompts leave the prefix at 11 places before its end."""
LONG_EDGES, SHORT_EDGES = 64, 4
"""Blocks of the other prompts: nodes hold 17 blocks on average, or 1.5."""
_BRANCH_TOKENS = 4 * BLOCK_SIZE
_FAMILIES = 16
_VOCAB_SIZE = 32_000
_SEED = 0


class FilledStore:
    """Owner of a store of `num_blocks` blocks, which stays full: what goes in pushes out what was used longest ago.

    A prefix of 3,500 tokens has KV on every rank. The rest are prompts of equal length in families; each takes the
    beginning of an earlier one of its family, on whose rank it runs. All tokens have scores.
    """

    def __init__(
        self,
        num_blocks: int,
        ep_size: int,
        filler_blocks: int = LONG_EDGES,
        journal: StoreJournal | None = None,
    ) -> None:
        """num_blocks: of routes in the whole store; the KV pools of all ranks together are as large.
        filler_blocks: of each of the other prompts."""
        self._rng = np.random.default_rng(_SEED)
        self._ep_size = ep_size
        self._filler_blocks = filler_blocks
        self._num_route_bytes = num_blocks * BLOCK_SIZE * SHAPE.bytes_per_token
        self._routes = _routes(self._rng)
        self._scores = _scores(self._rng)
        self._shared = self._tokens(SHARED_TOKENS)
        self._families = [self._tokens(filler_blocks * BLOCK_SIZE) for _ in range(_FAMILIES)]
        self.store = PrefixStore(
            num_ranks=ep_size,
            num_kv_blocks=num_blocks // ep_size,
            block_size=BLOCK_SIZE,
            route_shape=SHAPE,
            route_budget_bytes=self._num_route_bytes,
            score_budget_bytes=num_blocks * BLOCK_SIZE * SCORE_BYTES,
            kv_bytes_per_block=0,
            journal=journal,
        )
        self._fill()

    def prompt(self) -> Int32Array:
        """[PROMPT_TOKENS] int32: the shared tokens, then some that the store has never seen."""
        return np.concatenate([self._shared, self._tokens(PROMPT_TOKENS - SHARED_TOKENS)])

    def take_blocks(self, rank: Rank) -> list[BlockId]:
        """Blocks for the part of a prompt that is not shared, as its request computes it; evicts older KV."""
        return self._allocate(rank, OWN_BLOCKS)

    def routes(self, first_block: int, end_block: int) -> ExpertRoutes:
        """Of these blocks of any sequence: the same at the same position, so that equal prompts never conflict."""
        return self._routes.slice(first_block * BLOCK_SIZE, end_block * BLOCK_SIZE)

    def scores(self, first_block: int, end_block: int) -> TokenScores:
        """Of these blocks of any sequence."""
        return self._scores.slice(first_block * BLOCK_SIZE, end_block * BLOCK_SIZE)

    def refill(self, num_blocks: int) -> None:
        """So many blocks of the other traffic, or a few more: the store keeps its shape whatever is measured."""
        while num_blocks > 0:
            num_blocks -= self._insert_filler()

    def _fill(self) -> None:
        while self.store.stats().route_bytes < self._num_route_bytes:
            self._insert_filler()
            if self.store.stats().route_bytes > self._num_route_bytes // 2:
                self._share()
        for rank in range(self._ep_size):
            self._insert(self._shared, Rank(rank))

    def _insert_filler(self) -> int:
        """The next prompt of a family. Returns how many blocks it has of its own."""
        number = int(self._rng.integers(_FAMILIES))
        kept = int(self._rng.integers(self._filler_blocks))
        num_own = self._filler_blocks - kept
        prompt = np.concatenate(
            [self._families[number][: kept * BLOCK_SIZE], self._tokens(num_own * BLOCK_SIZE)]
        )
        self._families[number] = prompt
        self._insert(prompt, Rank(number % self._ep_size))
        return num_own

    def _share(self) -> None:
        """The hot prefix and the prompts that leave it, unless they are there already."""
        everywhere = (SHARED_BLOCKS * BLOCK_SIZE,) * self._ep_size
        if self.store.match(NAMESPACE, self._shared).num_kv_tokens == everywhere:
            return
        cuts = np.linspace(0, SHARED_BLOCKS, PATH_NODES + 1).astype(np.int64)[1:-1] * BLOCK_SIZE
        for cut in cuts:
            self._insert(
                np.concatenate([self._shared[:cut], self._tokens(_BRANCH_TOKENS)]), Rank(0)
            )
        for rank in range(self._ep_size):
            self._insert(self._shared, Rank(rank))

    def _insert(self, token_ids: Int32Array, rank: Rank) -> None:
        """A request from arrival to end, its KV computed wherever this rank has none."""
        cached = self.store.match(NAMESPACE, token_ids).num_kv_tokens[rank]
        lease = self.store.acquire(NAMESPACE, token_ids, cached)
        self.store.kv_block_ids(lease, rank, cached)
        first, end = cached // BLOCK_SIZE, len(token_ids) // BLOCK_SIZE
        block_ids = self._allocate(rank, end - first)
        publication = self.store.publish(
            lease, rank, token_ids, first, block_ids, self.routes(first, end)
        )
        self.store.record_scores(lease, first * BLOCK_SIZE, self.scores(first, end))
        self.store.release(lease)
        self.store.free(rank, _private(publication, block_ids))

    def _allocate(self, rank: Rank, num_blocks: int) -> list[BlockId]:
        block_ids = self.store.allocate(rank, num_blocks)
        assert block_ids is not None, "nothing else is leased"
        return block_ids

    def _tokens(self, count: int) -> Int32Array:
        return self._rng.integers(0, _VOCAB_SIZE, count, dtype=np.int32)


def _private(publication: Publication, block_ids: list[BlockId]) -> list[BlockId]:
    pairs = zip(publication.outcomes, block_ids, strict=True)
    return [block_id for outcome, block_id in pairs if outcome != "added"]


def _routes(rng: np.random.Generator) -> ExpertRoutes:
    dims = (PROMPT_TOKENS, SHAPE.num_moe_layers, SHAPE.num_experts_per_tok)
    ids = rng.integers(0, SHAPE.num_experts, dims).astype(SHAPE.id_dtype)
    return ExpertRoutes(ids, rng.random(dims).astype(SHAPE.weight_dtype))


def _scores(rng: np.random.Generator) -> TokenScores:
    scores = TokenScores.unknown(PROMPT_TOKENS)
    scores.rows["chosen_logprob"] = -rng.random(PROMPT_TOKENS, np.float32)
    return scores
