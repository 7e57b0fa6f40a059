"""Which rank becomes a request's home: the least estimated cost. Pure functions over plain data.

All ranks take every step together, so the load of the busiest rank is everyone's time. A prefix that several waiting
requests share is therefore charged to them together: one hot system prompt is computed again (replayed) on another rank
as soon as that evens out the load, instead of piling everybody onto the rank that has its KV.
(The cost form is close to Dynamo's KV router: uncached tokens plus load; the sharing term is ours.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.types import Rank

REPLAY_COST = 0.9
"""A replayed token's cost in computed tokens: no gate, no recording; attention and experts remain. On the demo model
the fastest of 40 steps of 512 or 1,024 tokens took 0.88 to 0.92 of the time when all were replayed (1, 2, 4 ranks)."""
SEQUENCE_COST = 64.0
"""A running sequence's cost in computed tokens: it holds a row of every step to come, and a lone row costs as much as a
few tokens of a long chunk. High enough that a rank does not collect sequences because their short tails are done."""


@dataclass(frozen=True)
class RankCandidate:
    """One rank as one waiting request sees it. Counts are tokens.

    num_kv_tokens:     prefix whose KV is there, or is being computed there by a running request
    num_shared_replay: tokens with routes to replay there, which `num_sharers` waiting requests would all use
    num_own_replay:    tokens whose KV is there and which it replays all the same, for their hidden states
    num_own:           tokens that only this request needs computed
    load:              queued tokens and running sequences of others, in computed tokens
    """

    rank: Rank
    num_kv_tokens: int
    num_shared_replay: int
    num_sharers: int
    num_own: int
    load: float
    num_own_replay: int = 0

    @property
    def cost(self) -> float:
        num_replay = self.num_shared_replay / self.num_sharers + self.num_own_replay
        return self.load + self.num_own + REPLAY_COST * num_replay


def select_home_rank(candidates: Sequence[RankCandidate]) -> RankCandidate:
    """The cheapest; ties go to the longer KV match, then to the lower rank. `candidates` is not empty."""
    return min(candidates, key=lambda c: (c.cost, -c.num_kv_tokens, c.rank))
