"""A chat's answer as Anthropic's /v1/messages tells it."""

from typing import Any, Literal

import msgspec
from pydantic_core import from_json

from router_service.choice_delta import ChoiceDelta, ChoiceEnd
from router_service.error_shapes import anthropic_error_body
from router_service.generation import Generation
from router_service.responses import WholeChoice
from router_service.said import CallHead, CallPart, Said, ToolCall
from router_service.streaming import named_event

Json = dict[str, Any]
TextKind = Literal["thinking", "text"]
BlockKind = TextKind | Literal["tool_use"]


class MessagesForm:
    """Owner of whether a stream has begun, and of which content block it is in."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._begun = False
        self._block: BlockKind | None = None
        self._num_blocks = 0
        """Begun so far."""
        self._end: ChoiceEnd | None = None

    def whole(self, choices: list[WholeChoice]) -> Json:
        (choice,) = choices
        return {
            **self._message(_blocks(choice.said), choice.weight_version),
            **_stop(choice.end),
            "usage": self._usage(choice.end),
        }

    def told(self, delta: ChoiceDelta) -> list[bytes]:
        told = b"" if self._begun else self._start(delta.weight_version)
        self._begun = True
        for part in delta.said.going_on:
            told += self._call(part)
        if delta.reasoning:
            told += self._add("thinking", delta.reasoning)
        if delta.text:
            told += self._add("text", delta.text)
        for part in delta.said.begun:
            told += self._call(part)
        if delta.end is not None:
            self._end = delta.end
        return [told]

    def closing(self) -> bytes:
        assert self._end is not None, "a generation tells how it ended"
        told = self._leave_block()
        told += _event("message_delta", delta=_stop(self._end), usage=self._usage(self._end))
        return told + _event("message_stop")

    def failure(self, error: Exception) -> bytes:
        return named_event("error", anthropic_error_body(error))

    def _start(self, weight_version: str) -> bytes:
        """How much of the prompt was cached is known at the end and told there."""
        counted = {
            "input_tokens": self._generation.num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = self._message([], weight_version)
        unknown = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, **unknown, "usage": counted})

    def _add(self, kind: TextKind, text: str) -> bytes:
        told = b""
        if self._block != kind:
            told = self._leave_block() + self._begin_block(_text_block(kind, ""))
            self._block = kind
        return told + self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, part: CallPart) -> bytes:
        told = b""
        if part.head is not None:
            told = self._leave_block() + self._begin_block(_tool_use(part.head, {}))
            self._block = "tool_use"
        if part.arguments:
            told += self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        return told + (self._leave_block() if part.ends else b"")

    def _begin_block(self, block: Json) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _leave_block(self) -> bytes:
        left, self._block = self._block, None
        return b"" if left is None else self._stop_block()

    def _stop_block(self) -> bytes:
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _message(self, content: list[Json], weight_version: str) -> Json:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "weight_version": weight_version,
            "content": content,
        }

    def _usage(self, end: ChoiceEnd) -> Json:
        """The three kinds of input tokens add up to the prompt."""
        return {
            "input_tokens": self._generation.num_prompt_tokens - end.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": end.cached_tokens,
            "output_tokens": end.completion_tokens,
        }


def _blocks(said: Said) -> list[Json]:
    thinking = [_text_block("thinking", said.reasoning)] if said.reasoning else []
    text = [_text_block("text", said.text)] if said.text else []
    return [*thinking, *text, *map(_called, said.tool_calls)]


def _text_block(kind: TextKind, text: str) -> Json:
    """Nothing signs what was thought: whoever sends it back is believed."""
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _called(call: ToolCall) -> Json:
    """The input is the JSON that the model wrote; of a call that was cut, what is complete of it, as SDKs make of a
    stream that ends there."""
    written = call.arguments.encode()
    whole = msgspec.Raw(written) if call.is_whole else from_json(written, allow_partial=True)
    return _tool_use(CallHead(call.id, call.name), whole)


def _tool_use(head: CallHead, written: Any) -> Json:
    return {"type": "tool_use", "id": head.id, "name": head.name, "input": written}


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


def _stop(end: ChoiceEnd) -> Json:
    return {"stop_reason": _stop_reason(end), "stop_sequence": end.stop_string}


def _stop_reason(end: ChoiceEnd) -> StopReason:
    if end.finish_reason == "tool_calls":
        return "tool_use"
    if end.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if end.finish_reason == "length" else "end_turn"


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
