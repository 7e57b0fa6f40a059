"""What the loss of ranks means for requests and store: KV and late frames of these ranks are gone, nothing else is.

A request that was there keeps its tokens and the routes that had arrived, and is placed anew as after a preemption: on
KV that another rank has, else by replay; tokens whose routes were still on their way pass the gate once more. One that
had ended waits for what its client asked for and was lost with the rank, if anything was.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.types import Rank, StepId
from router_service.clients import PrefixStore
from router_service.plans import Plans
from router_service.publisher import Publisher
from router_service.request import Request
from router_service.scheduler import Scheduler


@dataclass(frozen=True)
class LostRanks:
    """num_requests: that are placed anew. Of their known tokens, `num_routed_tokens` have routes, the others not."""

    num_requests: int = 0
    num_routed_tokens: int = 0
    num_unrouted_tokens: int = 0
    num_kv_blocks: int = 0


class RankLoss:
    """Works on the engine's parts, between steps."""

    def __init__(
        self, scheduler: Scheduler, store: PrefixStore, plans: Plans, publisher: Publisher
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._plans = plans
        self._publisher = publisher

    def lose(
        self, ranks: Iterable[Rank], requests: Iterable[Request], next_step: StepId
    ) -> LostRanks:
        """requests: all that the engine has. `finish_reason` of one that had ended and has to go on is None again."""
        ranks = set(ranks)
        for rank in ranks:
            self._publisher.lose_rank(rank, next_step)
        for request in requests:
            self._plans.release(request)
        displaced = [request for request in requests if request.home_rank in ranks]
        again = [request for request in displaced if self._displace(request)]
        num_kv_blocks = sum(self._store.drop_kv(rank) for rank in ranks)
        self._plans.clear()
        for request in self._scheduler.running:
            if request.replays_next:
                self._plans.want(request)
        num_routed = [min(request.num_recorded_tokens, request.num_tokens) for request in again]
        return LostRanks(
            num_requests=len(again),
            num_routed_tokens=sum(num_routed),
            num_unrouted_tokens=sum(request.num_tokens for request in again) - sum(num_routed),
            num_kv_blocks=num_kv_blocks,
        )

    def _displace(self, request: Request) -> bool:
        """Whether it goes on."""
        had_ended = request.finish_reason is not None
        self._scheduler.displace(request)
        if not had_ended:
            return True
        if request.error is not None or not request.end_later():
            return False
        self._scheduler.add(request)
        return True
