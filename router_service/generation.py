"""One admitted request through the engine: what its choices say, step by step. Both ways of answering consume this."""

import itertools
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cluster.errors import CellError, RequestError, WeightsChangedError
from cluster.messages import Completion, OutputDelta, RoutePart, Submit
from router_service.beside_the_loop import beside_the_loop
from router_service.choice_delta import ChoiceDelta, ChoiceEnd
from router_service.choice_output import ChoiceOutput, TextDelta
from router_service.engine_client import EngineClient
from router_service.field_names import FieldNames
from router_service.prompt_echo import Echoing
from router_service.request_admission import AdmittedRequest
from router_service.routes_encoding import EncodedRoutes, encode_routes
from router_service.tokenizer import TextCodec
from router_service.visits import Visit


@dataclass(frozen=True)
class Generation:
    """Identity of one answer and what it answers."""

    request: AdmittedRequest
    model: str
    prefix: str
    """Of the id, with what separates it from the rest."""
    names: FieldNames = field(default_factory=FieldNames)
    """Of the body that the request was made from."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{self.prefix}{self.token}"

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.request.prompts)


class _AskAgain(Exception):
    """The weights were exchanged before the client was shown anything of the answer."""


class Generator:
    """Runs generations on one engine. Stateless between them."""

    def __init__(self, client: EngineClient, codec: TextCodec) -> None:
        self._client = client
        self._codec = codec

    async def run(self, generation: Generation, visit: Visit) -> AsyncGenerator[ChoiceDelta, None]:
        """Deltas until every choice has ended. Raises CellError and its kin, also for a generation that failed.

        Close it when leaving early (contextlib.aclosing): the engine then aborts what is unfinished. Of an answer that
        is not streamed nothing is told before all of it is there: the engine may want to begin it anew.
        """
        for attempt in itertools.count():
            told = self._attempt(generation, visit, attempt)
            try:
                async with aclosing(told):
                    if generation.request.stream:
                        async for delta in told:
                            yield delta
                    else:
                        for delta in [delta async for delta in told]:
                            yield delta
                return
            except _AskAgain:
                continue

    async def _attempt(
        self, generation: Generation, visit: Visit, attempt: int
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Raises _AskAgain before it has yielded anything of a stream."""
        request = generation.request
        num_choices = len(request.prompts) * request.num_choices
        submits = [_submit(generation, visit, index, attempt) for index in range(num_choices)]
        index_of = {submit.request_id: index for index, submit in enumerate(submits)}
        num_prompt_tokens = generation.num_prompt_tokens
        visit.begin(num_prompt_tokens)
        echoing = await beside_the_loop(
            num_prompt_tokens if request.echoes else 0, lambda: _echoing(request, self._codec)
        )
        outputs = [
            ChoiceOutput(
                self._codec.detokenizer(
                    request.reading.markers, echoing.held(index) if echoing else b""
                ),
                request.stop,
                stop_token_ids=submit.sampling.stop_token_ids,
                min_tokens=submit.sampling.min_tokens,
                num_logprobs=request.num_logprobs or 0,
                reader=request.reading.reader(),
            )
            for index, submit in enumerate(submits)
        ]
        route_parts: list[list[RoutePart]] = [[] for _ in submits]
        with generation.names.restored():
            async with aclosing(self._client.generate(submits)) as deltas:
                async for delta in deltas:
                    index = index_of[delta.request_id]
                    visit.count_tokens(len(delta.token_ids))
                    if delta.routes is not None:
                        route_parts[index].append(delta.routes)
                    taken = await self._take(
                        request, index, outputs[index], delta, route_parts[index]
                    )
                    told = await echoing.add(index, delta, taken) if echoing else taken
                    _note_ends(visit, told)
                    for choice_delta in [*_prompt_scores(request, index, delta), *told]:
                        yield choice_delta

    async def _take(
        self,
        request: AdmittedRequest,
        index: int,
        output: ChoiceOutput,
        delta: OutputDelta,
        route_parts: list[RoutePart],
    ) -> list[ChoiceDelta]:
        """route_parts: of this choice so far, all when the delta completes it."""
        was_open = output.stopped_at is None
        new = output.add(delta.token_ids, delta.scores)
        version = delta.weight_version
        taken = [_choice_delta(index, new, version)] if new.said else []
        if delta.completion is not None:
            rest, end = _ending(request, index, output, delta.completion, route_parts)
            taken.append(_choice_delta(index, rest, version, end))
        elif was_open and output.stopped_at is not None:
            await self._client.finish(delta.request_id, output.stopped_at)
        return taken


def _note_ends(visit: Visit, told: list[ChoiceDelta]) -> None:
    for end in [delta.end for delta in told if delta.end is not None]:
        visit.end_choice(
            end.finish_reason,
            cached_tokens=end.cached_tokens,
            replayed_tokens=end.replayed_tokens,
        )


def _echoing(request: AdmittedRequest, codec: TextCodec) -> Echoing | None:
    if not request.echoes:
        return None
    sent = request.prompts_sent
    return Echoing(request.prompts, codec, request.num_choices, request.num_logprobs, sent)


def _submit(generation: Generation, visit: Visit, index: int, attempt: int) -> Submit:
    request = generation.request
    prompt, choice = divmod(index, request.num_choices)
    name = f"{generation.id}-{attempt}" if attempt else generation.id
    return Submit(
        request_id=f"{name}-{index}",
        prompt_token_ids=np.asarray(request.prompts[prompt], dtype=np.int32),
        sampling=request.sampling[prompt],
        tenant=visit.caller.tenant,
        cache_salt=request.cache_salt,
        return_routes=request.routes is not None,
        routes_start=0 if request.routes is None else request.routes.start,
        routes_end=None if request.routes is None else request.routes.end,
        return_route_weights=request.routes is not None and request.routes.weights,
        priority=request.priority,
        num_top_logprobs=max(1, request.num_logprobs or 0),
        return_scores=request.num_logprobs is not None,
        score_prompt=request.num_prompt_alternatives is not None and choice == 0,
        num_prompt_alternatives=max(1, request.num_prompt_alternatives or 0),
        choice=choice,
        leader_id=f"{name}-{index - choice}" if choice else None,
        is_streamed=request.stream,
        is_again=attempt > 0,
    )


def _prompt_scores(request: AdmittedRequest, index: int, delta: OutputDelta) -> list[ChoiceDelta]:
    if request.num_prompt_logprobs is None or delta.prompt_scores is None:
        return []
    return [ChoiceDelta(index, "", [], [], delta.weight_version, None, delta.prompt_scores)]


def _choice_delta(
    index: int, new: TextDelta, weight_version: str, end: ChoiceEnd | None = None
) -> ChoiceDelta:
    said = new.said
    return ChoiceDelta(
        index,
        said.text,
        new.token_ids,
        new.scored,
        weight_version,
        end,
        reasoning=said.reasoning,
        calls=said.calls,
    )


def _ending(
    request: AdmittedRequest,
    index: int,
    output: ChoiceOutput,
    completion: Completion,
    route_parts: list[RoutePart],
) -> tuple[TextDelta, ChoiceEnd]:
    """What was held back, and how the choice ended."""
    if completion.finish_reason == "error":
        if completion.is_at_fault:
            field = request.grammar_field
            raise RequestError(f"{field}: {completion.error}", field=field)
        raise CellError(f"generation failed: {completion.error}")
    if completion.finish_reason == "abort":
        raise _AskAgain if completion.again else WeightsChangedError(str(completion.error))
    rest = output.finish()
    stopped = output.stopped_at is not None
    prompt, choice = divmod(index, request.num_choices)
    num_prompt_tokens = len(request.prompts[prompt])
    inputs = range(num_prompt_tokens + output.num_tokens - 1)
    is_first, has_siblings = choice == 0, request.num_choices > 1
    of_prompt, of_completion = inputs[:num_prompt_tokens], inputs[num_prompt_tokens:]
    end = ChoiceEnd(
        finish_reason=_finish_reason(output, "stop" if stopped else completion.finish_reason),
        completion_tokens=output.num_tokens,
        cached_tokens=completion.cached_tokens if is_first else 0,
        replayed_tokens=completion.replayed_tokens if is_first else 0,
        routes=_routes(request, of_completion if has_siblings else inputs, route_parts),
        prompt_routes=_routes(request, of_prompt, route_parts)
        if is_first and has_siblings
        else None,
        stop_string=output.stop_string,
        reasoning_tokens=output.num_reasoning_tokens,
    )
    return rest, end


def _finish_reason(
    output: ChoiceOutput, reason: Literal["stop", "length"]
) -> Literal["stop", "length", "tool_calls"]:
    """A limit may have cut further calls, so it is told also where some are complete."""
    return "tool_calls" if reason == "stop" and output.num_calls else reason


def _routes(
    request: AdmittedRequest, within: range, parts: list[RoutePart]
) -> EncodedRoutes | None:
    if request.routes is None:
        return None
    if not parts:
        raise CellError("the engine sent no routes for a request that asked for them")
    return encode_routes(parts, request.routes, within)
