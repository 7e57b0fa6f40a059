"""What one client asked for at once and what has come of it, so that another engine can go on with it. No sockets.

A request has the id that its generation gave it, and at the engine another one each time that it is submitted: by it is
recognised what an engine says of an earlier time.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from cluster.errors import CellError, PointsmanError
from cluster.messages import Completion, OutputDelta, PromptSources, Refused, Submit

MAX_UNREAD_DELTAS = 4096
"""Of one request: they wait for a client that reads slowly, or not at all until its connection is given up."""

Outcome = OutputDelta | Refused | PointsmanError


@dataclass(eq=False)
class OpenRequest:
    """Grows with every delta that is taken."""

    submit: Submit
    """As it was asked for, with its seed."""
    id_at_engine: str
    next_route: int
    output_token_ids: list[int] = field(default_factory=list)
    prompt_sources: PromptSources | None = None
    has_prompt_scores: bool = False
    num_final_tokens: int | None = None
    """A stop string ends it there, whatever was told beyond."""
    is_complete: bool = False

    def take(self, delta: OutputDelta) -> None:
        self.output_token_ids += delta.token_ids
        self.prompt_sources = self.prompt_sources or delta.prompt_sources
        self.has_prompt_scores |= delta.prompt_scores is not None
        self.is_complete |= delta.completion is not None
        if delta.routes is not None:
            self.next_route = delta.routes.start + len(delta.routes.topk_ids)

    def rest(self, leader_id: str | None, *, was_told: bool) -> Submit:
        """What is left of it. was_told: something of the answer that it belongs to."""
        asked, sampling, told = self.submit, self.submit.sampling, self.output_token_ids
        end = self.num_final_tokens
        if end is not None:
            min_tokens = min(sampling.min_tokens, end)
            sampling, told = replace(sampling, max_tokens=end, min_tokens=min_tokens), told[:end]
        return replace(
            asked,
            request_id=self.id_at_engine,
            sampling=sampling,
            leader_id=leader_id,
            routes_start=self.next_route,
            score_prompt=asked.score_prompt and not self.has_prompt_scores,
            is_again=True,
            output_token_ids=np.array(told, np.int32) if was_told else None,
            prompt_sources=self.prompt_sources,
        )


class OpenAnswer:
    """Owner of its requests and of the outcomes that its consumer has not read yet."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        self.requests = [
            OpenRequest(submit, submit.request_id, submit.routes_start) for submit in submits
        ]
        self.outcomes: asyncio.Queue[Outcome] = asyncio.Queue(MAX_UNREAD_DELTAS * len(submits))
        self.is_at_engine = True
        """As far as is known; else it waits for one."""
        self.held_since: float | None = None
        """Its engine was lost then, and no engine has gone on with it since."""
        self.has_failed = False
        """Its error is the last thing that the consumer reads."""
        self.num_losses = 0
        """Engines that were lost with it."""
        self._num_submits = 1
        self._was_told = False
        """Something that a stream shows before its end."""
        self._weight_version = ""
        """Of the weights that made what was told."""

    @property
    def open_requests(self) -> list[OpenRequest]:
        return [request for request in self.requests if not request.is_complete]

    @property
    def waits(self) -> bool:
        """To be submitted again."""
        return not self.is_at_engine and not self.has_failed and bool(self.open_requests)

    def take(self, request: OpenRequest, delta: OutputDelta) -> None:
        """For the consumer, who reads the id that it gave."""
        if self.has_failed:
            request.is_complete |= delta.completion is not None
            return
        version, mine = delta.weight_version, self._weight_version
        if self.num_losses:
            delta = replace(delta, request_id=request.submit.request_id)
            if mine and version != mine:
                delta = self._made_by_others(delta)
        request.take(delta)
        self._weight_version = version
        self._was_told |= delta.routes is None
        if self.is_at_engine or not self.open_requests:
            self.held_since = None
        self._put(delta)

    def _made_by_others(self, delta: OutputDelta) -> OutputDelta:
        """An answer is made by one set of weights: what was not shown is asked for again as a whole."""
        is_shown = self.requests[0].submit.is_streamed and self._was_told
        version = delta.weight_version
        error = (
            f"the engine was lost, and the one that is there now serves other weights: {version}"
        )
        completion = Completion("abort", error, 0, 0, 0, again=not is_shown)
        return OutputDelta(delta.request_id, [], completion, weight_version=version)

    def _put(self, delta: OutputDelta) -> None:
        if not self.outcomes.full():
            self.outcomes.put_nowait(delta)
            return
        num_unread = self.outcomes.qsize()
        while not self.outcomes.empty():
            self.outcomes.get_nowait()
        self.fail(CellError(f"the client reads too slowly: {num_unread} deltas wait for it"))

    def fail(self, error: Refused | PointsmanError) -> None:
        """In place of a delta where there is no room: whoever reads that far gets the error."""
        if self.has_failed:
            return
        self.has_failed, self.held_since = True, None
        if self.outcomes.full():
            self.outcomes.get_nowait()
        self.outcomes.put_nowait(error)

    def rest(self) -> list[Submit]:
        """What is left of it, under other ids. A first choice that has ended leads no others."""
        requests = self.open_requests
        for request in requests:
            request.id_at_engine = f"{request.submit.request_id}+{self._num_submits}"
        self._num_submits += 1
        ids = {request.submit.request_id: request.id_at_engine for request in requests}
        return [
            request.rest(ids.get(request.submit.leader_id or ""), was_told=self._was_told)
            for request in requests
        ]
