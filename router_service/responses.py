"""Answers in the shapes of the OpenAI API, whole and as stream chunks. Pure functions of what a generation said."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from router_service.generation import ChoiceDelta, ChoiceEnd, Generation
from router_service.routes_encoding import EncodedRoutes

Json = dict[str, Any]


@dataclass(frozen=True)
class WholeChoice:
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    end: ChoiceEnd


def whole_choices(deltas: Iterable[ChoiceDelta]) -> list[WholeChoice]:
    """Deltas of one generation, joined by choice."""
    texts: dict[int, list[str]] = {}
    token_ids: dict[int, list[int]] = {}
    ends: dict[int, ChoiceEnd] = {}
    for delta in deltas:
        texts.setdefault(delta.index, []).append(delta.text)
        token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.end is not None:
            ends[delta.index] = delta.end
    return [
        WholeChoice(index, "".join(texts[index]), token_ids[index], ends[index])
        for index in sorted(ends)
    ]


def completion_response(generation: Generation, choices: list[WholeChoice]) -> Json:
    return {
        **_head(generation, "text_completion"),
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": None,
                **_choice_end(generation, choice.token_ids, choice.end),
            }
            for choice in choices
        ],
        "usage": usage(generation, [choice.end for choice in choices]),
        **_prompt_ids(generation),
    }


def chat_response(generation: Generation, choices: list[WholeChoice]) -> Json:
    return {
        **_head(generation, "chat.completion"),
        "choices": [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                **_choice_end(generation, choice.token_ids, choice.end),
            }
            for choice in choices
        ],
        "usage": usage(generation, [choice.end for choice in choices]),
        **_prompt_ids(generation),
    }


def usage(generation: Generation, ends: list[ChoiceEnd]) -> Json:
    prompt_tokens = generation.num_prompt_tokens
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
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

    def __init__(self, generation: Generation, *, chat: bool) -> None:
        self._generation = generation
        self._chat = chat
        self._first = True
        self._ends: list[ChoiceEnd] = []

    def opening(self) -> list[Json]:
        """A chat stream starts with the role."""
        if not self._chat:
            return []
        return [self._chunk(self._choice(0, {"role": "assistant", "content": ""}))]

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """Text first, then, in a chunk of its own, how the choice ended."""
        made = []
        token_ids = delta.token_ids
        if delta.text:
            made.append(
                self._chunk(self._choice(delta.index, self._content(delta.text), token_ids))
            )
            token_ids = []
        if delta.end is not None:
            self._ends.append(delta.end)
            made.append(self._chunk(self._last_choice(delta.index, token_ids, delta.end)))
        return made

    def usage_chunk(self) -> Json | None:
        """The chunk without choices; only for clients that asked."""
        if not self._generation.request.include_usage:
            return None
        return {
            **_head(self._generation, self._object),
            "choices": [],
            "usage": usage(self._generation, self._ends),
        }

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _content(self, text: str) -> Json:
        return {"content": text} if self._chat else {"text": text}

    def _choice(self, index: int, content: Json, token_ids: list[int] | None = None) -> Json:
        body = {"delta": content} if self._chat else content
        ids = {"token_ids": token_ids} if self._generation.request.return_token_ids else {}
        if token_ids is None:
            ids = {}
        return {"index": index, **body, "logprobs": None, "finish_reason": None, **ids}

    def _last_choice(self, index: int, token_ids: list[int], end: ChoiceEnd) -> Json:
        content: Json = {} if self._chat else {"text": ""}
        choice = self._choice(index, content)
        return {**choice, **_choice_end(self._generation, token_ids, end)}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**_head(self._generation, self._object), "choices": [choice]}
        if self._generation.request.include_usage:
            chunk["usage"] = None
        if self._first:
            self._first = False
            chunk.update(_prompt_ids(self._generation))
        return chunk


def _head(generation: Generation, kind: str) -> Json:
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
    }


def _choice_end(generation: Generation, token_ids: list[int], end: ChoiceEnd) -> Json:
    fields: Json = {"finish_reason": end.finish_reason}
    if generation.request.return_token_ids:
        fields["token_ids"] = token_ids
    if end.routes is not None:
        fields.update(_routes(end.routes))
    return fields


def _routes(routes: EncodedRoutes) -> Json:
    fields: Json = {
        "routed_experts": routes.topk_ids,
        "routed_range": [routes.start, routes.end],
    }
    if routes.topk_weights is not None:
        fields["routed_weights"] = routes.topk_weights
    return fields


def _prompt_ids(generation: Generation) -> Json:
    """One id list, or one per prompt where the request had several."""
    request = generation.request
    if not request.return_token_ids:
        return {}
    prompts = request.prompts
    return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}
