"""A chat's answer as /v1/responses tells it."""

from typing import Any

from router_service.choice_delta import ChoiceDelta, ChoiceEnd
from router_service.generation import Generation
from router_service.openai_errors import error_body
from router_service.responses import WholeChoice
from router_service.responses_api.answer import (
    item_id,
    item_status,
    message_item,
    response_object,
    text_part,
    token_logprobs,
)
from router_service.responses_api.body import ResponsesBody
from router_service.streaming import named_event
from router_service.tokenizer import TextCodec

Json = dict[str, Any]


class ResponsesForm:
    """Owner of what a stream has told so far: the text, its log-probs and the number of the next event."""

    def __init__(self, generation: Generation, body: ResponsesBody, codec: TextCodec) -> None:
        self._generation = generation
        self._body = body
        self._codec = codec
        self._num_events = 0
        self._text: list[str] = []
        self._logprobs: list[Json] = []
        self._output: list[Json] = []
        self._weight_version: str | None = None
        """Of the first delta; None before it."""
        self._end: ChoiceEnd | None = None

    def whole(self, choices: list[WholeChoice]) -> Json:
        (choice,) = choices
        self._weight_version = choice.weight_version
        logprobs = token_logprobs(self._generation, choice.scored, self._codec)
        content = [text_part(choice.text, logprobs)]
        item = message_item(self._generation, item_status(choice.end), content)
        return self._response([item], choice.end)

    def told(self, delta: ChoiceDelta) -> bytes:
        told = b""
        if self._weight_version is None:
            self._weight_version = delta.weight_version
            told = self._opening()
        logprobs = token_logprobs(self._generation, delta.scored, self._codec)
        self._text.append(delta.text)
        self._logprobs += logprobs
        if delta.text:
            told += self._part_event(
                "response.output_text.delta", delta=delta.text, logprobs=logprobs
            )
        return told if delta.end is None else told + self._ended(delta.end)

    def closing(self) -> bytes:
        assert self._end is not None, "a generation tells how it ended"
        kind = f"response.{item_status(self._end)}"
        return self._event(kind, response=self._response(self._output, self._end))

    def failure(self, error: Exception) -> bytes:
        said = error_body(error)["error"]
        told = {"code": said["type"], "message": said["message"]}
        response = self._response(self._output, None, error=told)
        return self._event("response.failed", response=response)

    def _opening(self) -> bytes:
        started = self._response([], None)
        empty = message_item(self._generation, "in_progress", [])
        return b"".join(
            [
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
                self._event("response.output_item.added", output_index=0, item=empty),
                self._part_event("response.content_part.added", part=text_part("", [])),
            ]
        )

    def _ended(self, end: ChoiceEnd) -> bytes:
        self._end = end
        text, logprobs = "".join(self._text), self._logprobs
        part = text_part(text, logprobs)
        item = message_item(self._generation, item_status(end), [part])
        self._output.append(item)
        return b"".join(
            [
                self._part_event("response.output_text.done", text=text, logprobs=logprobs),
                self._part_event("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=item),
            ]
        )

    def _response(
        self, output: list[Json], end: ChoiceEnd | None, *, error: Json | None = None
    ) -> Json:
        return response_object(
            self._generation,
            self._body,
            output=output,
            weight_version=self._weight_version or "",
            end=end,
            error=error,
        )

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        """Of the one text part of the one item."""
        place = {"item_id": item_id(self._generation), "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})
