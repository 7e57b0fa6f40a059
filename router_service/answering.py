"""A generation answered over HTTP, whole or as a stream, in the form of whichever API asked for it."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Protocol

from fastapi import Request
from starlette.responses import Response

from router_service.beside_the_loop import beside_the_loop
from router_service.choice_delta import ChoiceDelta
from router_service.generation import Generation, Generator
from router_service.json_pieces import JsonAnswer, json_parts, one_by_one
from router_service.logprobs import num_scores
from router_service.responses import Json, WholeChoice, whole_choices
from router_service.streaming import EventStream, unless_client_leaves
from router_service.visits import Visit, visit_of


class AnswerForm(Protocol):
    """One generation as one API tells it: whole, or as the bytes of server-sent events, in pieces."""

    def whole(self, choices: list[WholeChoice]) -> Json:
        """The body of the answer."""

    def told(self, delta: ChoiceDelta) -> Iterable[bytes]:
        """Events of one delta."""

    def closing(self) -> bytes:
        """Events after the last delta."""

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that breaks off."""


class Answering:
    """Runs generations and tells them. Stateless between them."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def answer(self, request: Request, generation: Generation, form: AnswerForm) -> Response:
        """The body of `request` must have been read. Raises CellError and its kin, ClientLeft."""
        visit = visit_of(request.scope)
        visit.model, visit.response_id = generation.model, generation.id
        visit.is_streamed = generation.request.stream
        if generation.request.stream:
            return EventStream(lambda: self._events(generation, visit, form), form.failure)
        deltas = await unless_client_leaves(request.receive, self._collect(generation, visit))
        choices = whole_choices(deltas)
        num_scored = sum(choice.num_scored for choice in choices)
        parts = await beside_the_loop(num_scored, lambda: json_parts(form.whole(choices)))
        return JsonAnswer(parts)

    async def _collect(self, generation: Generation, visit: Visit) -> list[ChoiceDelta]:
        async with aclosing(self._generator.run(generation, visit)) as deltas:
            return [delta async for delta in deltas]

    async def _events(
        self, generation: Generation, visit: Visit, form: AnswerForm
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._generator.run(generation, visit)) as deltas:
            async for delta in deltas:
                size = num_scores(delta.scored)
                pieces = await beside_the_loop(size, partial(_begun, form, delta))
                async for piece in one_by_one(pieces):
                    yield piece
        yield form.closing()


def _begun(form: AnswerForm, delta: ChoiceDelta) -> Iterator[bytes]:
    """The events of `delta`, whose log-probs are written out by the time that the first piece is there."""
    pieces = iter(form.told(delta))
    first = next(pieces, None)
    return pieces if first is None else chain((first,), pieces)
