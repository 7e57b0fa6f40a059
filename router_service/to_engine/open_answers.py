"""The answers that are open at an engine or wait for one. Decides who goes on when an engine is lost; sends nothing."""

from cluster.errors import CellError, DeadlineError, PointsmanError
from cluster.messages import OutputDelta, Refused, Submit
from router_service.to_engine.open_answer import OpenAnswer, OpenRequest

MAX_LOSSES = 3
"""Engines that may die while they have an answer: then it may be what kills them."""
_PASSING = frozenset({"unavailable", "overloaded"})
"""Kinds of refusals that an engine does not repeat for ever."""


class OpenAnswers:
    """Owner of the table. An answer leaves it with its consumer. Times are those of one clock, in seconds."""

    def __init__(self, outage_seconds: float) -> None:
        """outage_seconds: so long an answer whose engine is lost waits until one goes on with it; 0: not at all."""
        self._outage_seconds = outage_seconds
        self._answers: dict[OpenAnswer, None] = {}
        """In the order in which they were asked for."""
        self._at_engine: dict[str, tuple[OpenAnswer, OpenRequest]] = {}
        """By the id that they have there."""
        self._requests: dict[str, tuple[OpenAnswer, OpenRequest]] = {}
        """By the id that their consumer gave."""
        self._stale_ids: set[str] = set()
        """That an engine may know which was lost."""

    def __len__(self) -> int:
        return len(self._answers)

    def open(self, answer: OpenAnswer) -> None:
        self._answers[answer] = None
        self._requests.update({r.submit.request_id: (answer, r) for r in answer.requests})
        self._list(answer)

    def close(self, answer: OpenAnswer) -> list[str]:
        """Its consumer has left. Returns ids that an engine may still compute."""
        self._unlist(answer)
        for request in answer.requests:
            self._requests.pop(request.submit.request_id, None)
        del self._answers[answer]
        return [r.id_at_engine for r in answer.open_requests] if answer.is_at_engine else []

    def take(self, outcome: OutputDelta | Refused, now: float) -> None:
        """Of an id that is not in the table nobody wants to know: it was left, or is another one now."""
        found = self._at_engine.get(outcome.request_id)
        if found is None:
            return
        answer, request = found
        if isinstance(outcome, OutputDelta):
            answer.take(request, outcome)
            return
        answer.is_at_engine = False
        if answer.num_losses and outcome.kind in _PASSING:
            answer.held_since = answer.held_since or now
        else:
            answer.fail(outcome)

    def finish(self, request_id: str, num_output_tokens: int) -> str | None:
        """request_id: that of the consumer. Returns the engine's, if one has it."""
        answer, request = self._requests[request_id]
        request.num_final_tokens = num_output_tokens
        return request.id_at_engine if answer.is_at_engine else None

    # --- an engine is lost

    def lose(self, now: float) -> None:
        """What it had waits for the next one, or ends here."""
        for answer in self._answers:
            if not answer.is_at_engine:
                continue
            answer.is_at_engine = False
            answer.num_losses += 1
            self._stale_ids.update(request.id_at_engine for request in answer.open_requests)
            if not answer.open_requests:
                continue
            if not self._outage_seconds:
                answer.fail(CellError("the engine is lost"))
            elif answer.num_losses >= MAX_LOSSES:
                answer.fail(
                    CellError(
                        f"{answer.num_losses} engines were lost while they had this request: it may be the reason"
                    )
                )
            elif not answer.has_failed and answer.held_since is None:
                answer.held_since = now

    def take_stale_ids(self) -> list[str]:
        """To be aborted before anything else: the engine may only have been out of reach."""
        ids, self._stale_ids = sorted(self._stale_ids), set()
        return ids

    def waiting(self) -> list[OpenAnswer]:
        return [answer for answer in self._answers if answer.waits]

    def rest_of(self, answer: OpenAnswer) -> list[Submit]:
        """What is left of one that waits, to be submitted now."""
        self._unlist(answer)
        rest = answer.rest()
        answer.is_at_engine = True
        self._list(answer)
        return rest

    @property
    def num_held(self) -> int:
        return sum(answer.held_since is not None for answer in self._answers)

    def serve(self) -> None:
        """The engine says that it goes on with all that it has."""
        for answer in self._answers:
            if answer.is_at_engine:
                answer.held_since = None

    def expire(self, now: float) -> None:
        """Ends what has waited too long."""
        for answer in self._answers:
            if answer.held_since is not None and now - answer.held_since >= self._outage_seconds:
                answer.fail(
                    DeadlineError(
                        f"the engine is lost, and none went on within {self._outage_seconds:g} s "
                        "(--recovery-limit)"
                    )
                )

    def fail(self, error: PointsmanError) -> None:
        """Ends all."""
        for answer in self._answers:
            answer.fail(error)

    def _list(self, answer: OpenAnswer) -> None:
        for request in answer.open_requests:
            self._at_engine[request.id_at_engine] = answer, request

    def _unlist(self, answer: OpenAnswer) -> None:
        for request in answer.requests:
            self._at_engine.pop(request.id_at_engine, None)
