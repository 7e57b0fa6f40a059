"""Answers in the shapes of the OpenAI API, whole and as stream chunks. Pure functions of what a generation said."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cluster.scores import ScoreColumns
from router_service.chat_speech import message_deltas, opening_delta, whole_message
from router_service.choice_delta import ChoiceDelta, ChoiceEnd
from router_service.generation import Generation
from router_service.logprobs import (
    ScoredToken,
    chat_logprobs,
    completion_logprobs,
    num_scores,
    prompt_logprobs,
)
from router_service.routes_encoding import EncodedRoutes
from router_service.said import CallPart, Said, joined
from router_service.tokenizer import TextCodec
from router_service.usage_so_far import UsageSoFar

Json = dict[str, Any]


@dataclass(frozen=True)
class WholeChoice:
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    scored: list[ScoredToken]
    weight_version: str
    end: ChoiceEnd
    prompt_scores: ScoreColumns | None
    """See ChoiceDelta."""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    @property
    def said(self) -> Said:
        return Said(self.text, self.reasoning, self.calls)

    @property
    def num_scored(self) -> int:
        """Tokens and alternatives that it has log-probs of."""
        of_prompt = 0 if self.prompt_scores is None else self.prompt_scores.top_ids.size
        return num_scores(self.scored) + of_prompt


def whole_choices(deltas: Iterable[ChoiceDelta]) -> list[WholeChoice]:
    """Deltas of one generation, joined by choice."""
    said: dict[int, list[Said]] = {}
    token_ids: dict[int, list[int]] = {}
    scored: dict[int, list[ScoredToken]] = {}
    ends: dict[int, ChoiceEnd] = {}
    prompt_scores: dict[int, ScoreColumns] = {}
    versions: dict[int, str] = {}
    for delta in deltas:
        said.setdefault(delta.index, []).append(delta.said)
        token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        scored.setdefault(delta.index, []).extend(delta.scored)
        if delta.end is not None:
            ends[delta.index], versions[delta.index] = delta.end, delta.weight_version
        if delta.prompt_scores is not None:
            prompt_scores[delta.index] = delta.prompt_scores
    whole = {index: joined(said[index]) for index in sorted(ends)}
    return [
        WholeChoice(
            index,
            what.text,
            token_ids[index],
            scored[index],
            versions[index],
            ends[index],
            prompt_scores.get(index),
            what.reasoning,
            what.calls,
        )
        for index, what in whole.items()
    ]


def completion_response(
    generation: Generation, choices: list[WholeChoice], codec: TextCodec
) -> Json:
    told = _prompt_logprobs(generation, choices, codec)
    return {
        **_head(generation, "text_completion", choices[0].weight_version),
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": _completion_logprobs(generation, choice.scored, codec),
                **_of_its_prompt(generation, choice.index, told),
                **_choice_end(generation, choice.token_ids, choice.end),
            }
            for choice in choices
        ],
        "usage": usage(generation, [choice.end for choice in choices]),
        **_prompt_ids(generation),
        **_prompt_routes(generation, [choice.end for choice in choices]),
    }


def chat_response(generation: Generation, choices: list[WholeChoice], codec: TextCodec) -> Json:
    return {
        **_head(generation, "chat.completion", choices[0].weight_version),
        "choices": [
            {
                "index": choice.index,
                "message": whole_message(choice.said, generation.request.reading),
                "logprobs": _chat_logprobs(generation, choice.scored, codec),
                **_choice_end(generation, choice.token_ids, choice.end),
            }
            for choice in choices
        ],
        "usage": usage(generation, [choice.end for choice in choices]),
        **_of_its_prompt(generation, 0, _prompt_logprobs(generation, choices, codec)),
        **_prompt_ids(generation),
        **_prompt_routes(generation, [choice.end for choice in choices]),
    }


def usage(generation: Generation, ends: list[ChoiceEnd]) -> Json:
    prompt_tokens = generation.num_prompt_tokens
    completion_tokens = sum(end.completion_tokens for end in ends)
    details: Json = {}
    if generation.request.reading.reasoning is not None:
        reasoning_tokens = sum(end.reasoning_tokens for end in ends)
        details = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        **details,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(end.cached_tokens for end in ends),
            "replayed_tokens": sum(end.replayed_tokens for end in ends),
        },
    }


class ChunkWriter:
    """Chunks of one streamed answer. Knows whether the first chunk was made, and how the choices ended."""

    def __init__(self, generation: Generation, codec: TextCodec, *, chat: bool) -> None:
        self._generation = generation
        self._codec = codec
        self._chat = chat
        self._first = True
        self._weight_version = ""
        self._ends: list[ChoiceEnd] = []
        self._num_calls: Counter[int] = Counter()
        """Told so far, by choice."""
        self._usage_so_far = UsageSoFar(generation.num_prompt_tokens)

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """What is said, then, in a chunk of its own, how the choice ended. The first has the tokens. A chat
        stream starts with the role of every choice."""
        made: list[Json] = []
        if self._first:
            self._weight_version = delta.weight_version
            made += self._opening()
        self._usage_so_far.take(delta)
        rest = delta
        contents = self._contents(delta)
        if contents:
            made.append(self._chunk(self._choice(delta.index, contents[0], delta)))
            made += [self._chunk(self._choice(delta.index, content)) for content in contents[1:]]
            rest = replace(delta, token_ids=[], scored=[])
        if rest.end is not None:
            self._ends.append(rest.end)
            chunk = self._chunk(self._last_choice(rest, rest.end))
            made.append({**chunk, **_of_prompt(rest.end.prompt_routes)})
        return made

    def _opening(self) -> list[Json]:
        if not self._chat:
            return []
        content = opening_delta(self._generation.request.reading)
        num_choices = self._generation.request.num_choices
        return [self._chunk(self._choice(index, content)) for index in range(num_choices)]

    def usage_chunk(self) -> Json | None:
        """The chunk without choices; only for clients that asked."""
        if not self._generation.request.include_usage:
            return None
        return {
            **_head(self._generation, self._object, self._weight_version),
            "choices": [],
            "usage": usage(self._generation, self._ends),
        }

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _contents(self, delta: ChoiceDelta) -> list[Json]:
        if not self._chat:
            return [{"text": delta.text}] if delta.text else []
        contents = message_deltas(delta.said, self._num_calls[delta.index])
        self._num_calls[delta.index] += len(delta.said.begun)
        return contents

    def _choice(self, index: int, content: Json, delta: ChoiceDelta | None = None) -> Json:
        """delta: whose tokens come along."""
        body = {"delta": content} if self._chat else content
        choice = {"index": index, **body, "logprobs": None, "finish_reason": None}
        if delta is not None:
            choice["logprobs"] = self._logprobs(delta.scored)
            if self._generation.request.return_token_ids:
                choice["token_ids"] = delta.token_ids
        return choice

    def _last_choice(self, delta: ChoiceDelta, end: ChoiceEnd) -> Json:
        choice = self._choice(delta.index, {} if self._chat else {"text": ""})
        if delta.scored:
            choice["logprobs"] = self._logprobs(delta.scored)
        return {**choice, **_choice_end(self._generation, delta.token_ids, end)}

    def _logprobs(self, scored: list[ScoredToken]) -> Json | None:
        logprobs = _chat_logprobs if self._chat else _completion_logprobs
        return logprobs(self._generation, scored, self._codec)

    def _chunk(self, choice: Json) -> Json:
        head = _head(self._generation, self._object, self._weight_version)
        chunk = {**head, "choices": [choice]}
        if self._generation.request.include_usage:
            continuous = self._generation.request.continuous_usage
            chunk["usage"] = self._usage_so_far.counts() if continuous else None
        if self._first:
            self._first = False
            chunk.update(_prompt_ids(self._generation))
        return chunk


def _completion_logprobs(
    generation: Generation, scored: list[ScoredToken], codec: TextCodec
) -> Json | None:
    if generation.request.num_logprobs is None:
        return None
    return completion_logprobs(scored, codec)


def _chat_logprobs(
    generation: Generation, scored: list[ScoredToken], codec: TextCodec
) -> Json | None:
    num_logprobs = generation.request.num_logprobs
    return (
        chat_logprobs(scored, codec, with_top=num_logprobs > 0)
        if num_logprobs is not None
        else None
    )


def _prompt_logprobs(
    generation: Generation, choices: list[WholeChoice], codec: TextCodec
) -> list[list[Json | None]]:
    """Of every prompt, if they were asked; built once for all its choices."""
    request = generation.request
    if request.num_prompt_logprobs is None:
        return []
    scores = [choice.prompt_scores for choice in choices if choice.prompt_scores is not None]
    return [
        prompt_logprobs(*pair, request.num_prompt_logprobs, codec)
        for pair in zip(request.prompts, scores, strict=True)
    ]


def _of_its_prompt(generation: Generation, index: int, told: list[list[Json | None]]) -> Json:
    """What `_prompt_logprobs` told of the prompt of choice `index`."""
    if not told:
        return {}
    return {"prompt_logprobs": told[index // generation.request.num_choices]}


def _head(generation: Generation, kind: str, weight_version: str) -> Json:
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "weight_version": weight_version,
    }


def _choice_end(generation: Generation, token_ids: list[int], end: ChoiceEnd) -> Json:
    fields: Json = {"finish_reason": _finish_reason(generation, end)}
    if generation.request.return_token_ids:
        fields["token_ids"] = token_ids
    if end.routes is not None:
        fields.update(_routes(end.routes))
    return fields


def _finish_reason(generation: Generation, end: ChoiceEnd) -> str:
    """A call of the function that the client named is no news to it: the answer has just stopped (OpenAI)."""
    tools = generation.request.reading.tools
    is_named = tools is not None and tools.is_of_one_function
    return "stop" if is_named and end.finish_reason == "tool_calls" else end.finish_reason


def _routes(routes: EncodedRoutes) -> Json:
    fields: Json = {
        "routed_experts": routes.topk_ids,
        "routed_range": [routes.start, routes.end],
    }
    if routes.topk_weights is not None:
        fields["routed_weights"] = routes.topk_weights
    return fields


def _prompt_routes(generation: Generation, ends: list[ChoiceEnd]) -> Json:
    """Of the prompt, told once for all its choices; lists where the request had several prompts."""
    told = [_of_prompt(end.prompt_routes) for end in ends if end.prompt_routes is not None]
    if len(generation.request.prompts) == 1 or not told:
        return told[0] if told else {}
    return {name: [fields[name] for fields in told] for name in told[0]}


def _of_prompt(routes: EncodedRoutes | None) -> Json:
    if routes is None:
        return {}
    return {f"prompt_{name}": value for name, value in _routes(routes).items()}


def _prompt_ids(generation: Generation) -> Json:
    """One id list, or one per prompt where the request had several."""
    request = generation.request
    if not request.return_token_ids:
        return {}
    prompts = request.prompts
    return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}
