"""A chat's answer as Anthropic's /v1/messages tells it."""

from typing import Any, Literal

from router_service.choice_delta import ChoiceDelta, ChoiceEnd
from router_service.error_shapes import anthropic_error_body
from router_service.generation import Generation
from router_service.responses import WholeChoice
from router_service.streaming import named_event

Json = dict[str, Any]


class MessagesForm:
    """Owner of whether a stream has begun, and of which content block it is in."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._begun = False
        self._in_text = False
        self._end: ChoiceEnd | None = None

    def whole(self, choices: list[WholeChoice]) -> Json:
        (choice,) = choices
        content = [{"type": "text", "text": choice.text}] if choice.text else []
        return {
            **self._message(content, choice.weight_version),
            **_stop(choice.end),
            "usage": self._usage(choice.end),
        }

    def told(self, delta: ChoiceDelta) -> bytes:
        told = b"" if self._begun else self._start(delta.weight_version)
        self._begun = True
        if delta.text:
            if not self._in_text:
                self._in_text = True
                block = {"type": "text", "text": ""}
                told += _event("content_block_start", index=0, content_block=block)
            text = {"type": "text_delta", "text": delta.text}
            told += _event("content_block_delta", index=0, delta=text)
        if delta.end is not None:
            self._end = delta.end
        return told

    def closing(self) -> bytes:
        assert self._end is not None, "a generation tells how it ended"
        told = _event("content_block_stop", index=0) if self._in_text else b""
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


StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


def _stop(end: ChoiceEnd) -> Json:
    return {"stop_reason": _stop_reason(end), "stop_sequence": end.stop_string}


def _stop_reason(end: ChoiceEnd) -> StopReason:
    if end.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if end.finish_reason == "length" else "end_turn"


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
