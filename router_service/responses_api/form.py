"""A chat's answer as /v1/responses tells it."""

from typing import Any

from router_service.choice_delta import ChoiceDelta, ChoiceEnd
from router_service.error_shapes import message_with_code
from router_service.generation import Generation
from router_service.logprobs import ScoredToken, chat_logprobs
from router_service.openai_errors import error_body
from router_service.responses import WholeChoice
from router_service.responses_api.answer import item_status, response_object
from router_service.responses_api.body import ResponsesBody
from router_service.responses_api.items import OutputItems
from router_service.streaming import named_event
from router_service.tokenizer import TextCodec

Json = dict[str, Any]


class ResponsesForm:
    """Owner of what an answer has told so far: its items and the number of the next event."""

    def __init__(self, generation: Generation, body: ResponsesBody, codec: TextCodec) -> None:
        self._generation = generation
        self._body = body
        self._codec = codec
        self._num_events = 0
        self._items = OutputItems(generation.token)
        self._weight_version: str | None = None
        """Of the first delta; None before it."""
        self._end: ChoiceEnd | None = None

    def whole(self, choices: list[WholeChoice]) -> Json:
        (choice,) = choices
        self._weight_version = choice.weight_version
        self._items.say(choice.said, self._token_logprobs(choice.scored))
        self._items.end(item_status(choice.end))
        return self._response(choice.end)

    def told(self, delta: ChoiceDelta) -> list[bytes]:
        told = b""
        if self._weight_version is None:
            self._weight_version = delta.weight_version
            told = self._opening()
        events = self._items.say(delta.said, self._token_logprobs(delta.scored))
        if delta.end is not None:
            self._end = delta.end
            events += self._items.end(item_status(delta.end))
        return [told + b"".join(self._event(kind, **fields) for kind, fields in events)]

    def closing(self) -> bytes:
        assert self._end is not None, "a generation tells how it ended"
        return self._event(f"response.{item_status(self._end)}", response=self._response(self._end))

    def failure(self, error: Exception) -> bytes:
        told = {"code": error_body(error)["error"]["type"], "message": message_with_code(error)}
        return self._event("response.failed", response=self._response(None, error=told))

    def _opening(self) -> bytes:
        started = self._response(None)
        return b"".join(
            self._event(kind, response=started)
            for kind in ("response.created", "response.in_progress")
        )

    def _response(self, end: ChoiceEnd | None, *, error: Json | None = None) -> Json:
        return response_object(
            self._generation,
            self._body,
            output=self._items.finished,
            weight_version=self._weight_version or "",
            end=end,
            error=error,
        )

    def _token_logprobs(self, scored: list[ScoredToken]) -> list[Json]:
        """Empty unless they were asked for."""
        num_logprobs = self._generation.request.num_logprobs
        if num_logprobs is None:
            return []
        told: list[Json] = chat_logprobs(scored, self._codec, with_top=num_logprobs > 0)["content"]
        return told

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})
