"""Prefixes that are being computed right now, so that nobody computes them a second time beside it."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import TypeVar

from cluster.types import Rank
from router_service.request import Request

K = TypeVar("K")


class InFlight:
    """Full prompt blocks that requests compute, or have computed, and have not offered to the store yet, by key; and of
    those whose prompt is being scored, the block whose scores come next."""

    def __init__(self, requests: Iterable[Request], block_size: int) -> None:
        self._block_size = block_size
        self.anywhere: dict[bytes, Request] = {}
        self.on_rank: dict[tuple[Rank, bytes], Request] = {}
        self._scored: dict[tuple[int, int], dict[bytes, Request]] = {}
        """By alternatives that are listed and number of the block."""
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        assert request.home_rank is not None
        if not request.publishing:
            return
        self._add_scored(request)
        # what was offered and refused will not come; what is not computed of an ended request neither
        first = max(request.num_published_blocks, request.num_offered_blocks)
        ended = request.finish_reason is not None
        end = request.num_computed_tokens // self._block_size if ended else None
        for key in request.prompt_block_keys[first:end]:
            _put(self.anywhere, key, request)
            _put(self.on_rank, (request.home_rank, key), request)

    def _add_scored(self, request: Request) -> None:
        log, keys = request.score_log, request.prompt_block_keys
        block = log.num_stored // self._block_size
        if log.scores_prompt and block < len(keys) and not log.is_complete:
            _put(self._scored.setdefault((log.num_listed, block), {}), keys[block], request)

    def scoring(self, request: Request) -> Request | None:
        """Who computes scores that this one asks for too. The store had none of that block when that one started."""
        keys = request.prompt_block_keys
        for (num_listed, block), by_key in self._scored.items():
            if num_listed == request.score_log.num_listed and block < len(keys):
                scoring = by_key.get(keys[block])
                if scoring is not None:
                    return scoring
        return None

    def shared_end(self, request: Request, other: Request) -> int:
        """Tokens of full prompt blocks that both share from position 0."""
        mine, theirs = request.prompt_block_keys, other.prompt_block_keys
        shortest = min(len(mine), len(theirs))
        # keys are chained: equal up to some block, different from there on
        common = bisect_left(range(shortest), True, key=lambda i: mine[i] != theirs[i])
        return common * self._block_size


def _put(table: dict[K, Request], key: K, request: Request) -> None:
    """Of several that compute the same, the first one, but one that gets its tokens earlier before that."""
    known = table.get(key)
    if known is None or request.priority < known.priority:
        table[key] = request
