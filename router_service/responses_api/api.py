"""The handler of /v1/responses: a chat in other words, stateless."""

from fastapi import Request
from starlette.responses import Response

from router_service.generation import Generation
from router_service.openai_api import ApiParts
from router_service.responses_api.body import THE_CHATS, ResponsesBody
from router_service.responses_api.form import ResponsesForm
from router_service.responses_api.to_chat import chat_of
from router_service.translated_chat import own_part


class ResponsesApi:
    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts

    async def create(self, request: Request) -> Response:
        parts = self._parts
        body, passed = own_part(ResponsesBody, await parts.bodies.json(request), THE_CHATS)
        chat = chat_of(body, passed)
        with chat.names.restored():
            admitted = await parts.admission.read_chat(chat.body())
        generation = Generation(admitted, parts.model.name, "resp_", chat.names)
        form = ResponsesForm(generation, body, parts.model.text.codec)
        return await parts.answering.answer(request, generation, form)
