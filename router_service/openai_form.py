"""Completions and chats as OpenAI's API tells them: bodies and chunks of `responses.py` as an AnswerForm."""

from collections.abc import Iterator

from router_service.choice_delta import ChoiceDelta
from router_service.generation import Generation
from router_service.json_pieces import event_parts, in_pieces
from router_service.openai_errors import error_body
from router_service.responses import (
    ChunkWriter,
    Json,
    WholeChoice,
    chat_response,
    completion_response,
)
from router_service.streaming import DONE, event
from router_service.tokenizer import TextCodec


class OpenAiForm:
    def __init__(self, generation: Generation, codec: TextCodec, *, chat: bool) -> None:
        self._generation = generation
        self._codec = codec
        self._respond = chat_response if chat else completion_response
        self._writer = ChunkWriter(generation, codec, chat=chat)

    def whole(self, choices: list[WholeChoice]) -> Json:
        return self._respond(self._generation, choices, self._codec)

    def told(self, delta: ChoiceDelta) -> Iterator[bytes]:
        return in_pieces(
            part for chunk in self._writer.chunks(delta) for part in event_parts(chunk)
        )

    def closing(self) -> bytes:
        usage_chunk = self._writer.usage_chunk()
        return (b"" if usage_chunk is None else event(usage_chunk)) + DONE

    def failure(self, error: Exception) -> bytes:
        return event(error_body(error))
