"""Prefixes that are being computed right now, so that nobody computes them a second time beside it."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import TypeVar

from cluster.types import Rank
from router_service.request import Request

K = TypeVar("K")


class InFlight:
    """Full prompt blocks that requests compute, or have computed, and have not offered to the store yet, by key."""

    def __init__(self, requests: Iterable[Request], block_size: int) -> None:
        self._block_size = block_size
        self.anywhere: dict[bytes, Request] = {}
        self.on_rank: dict[tuple[Rank, bytes], Request] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        assert request.home_rank is not None
        if not request.publishing:
            return
        # what was offered and refused will not come; what is not computed of an ended request neither
        first = max(request.num_published_blocks, request.num_offered_blocks)
        ended = request.finish_reason is not None
        end = request.num_computed_tokens // self._block_size if ended else None
        for key in request.prompt_block_keys[first:end]:
            _put(self.anywhere, key, request)
            _put(self.on_rank, (request.home_rank, key), request)

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
