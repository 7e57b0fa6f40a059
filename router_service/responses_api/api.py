"""The handler of /v1/responses: a chat in other words, stateless."""

from fastapi import Request
from starlette.responses import Response

from router_service.generation import Generation
from router_service.openai_api import ApiParts, admitted_unless_client_leaves
from router_service.responses_api.body import THE_CHATS, ResponsesBody
from router_service.responses_api.form import ResponsesForm
from router_service.responses_api.to_chat import chat_of
from router_service.translated_chat import own_part


class ResponsesApi:
    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts

    async def create(self, request: Request) -> Response:
        generation, form = await self._asked(request)
        return await self._parts.answering.answer(request, generation, form)

    async def _asked(self, request: Request) -> tuple[Generation, ResponsesForm]:
        """The answer repeats what the request says of itself, so the form keeps that part of the body."""
        parts = self._parts
        async with parts.bodies.opened(request) as json:
            body, passed = own_part(ResponsesBody, json, THE_CHATS)
            chat = chat_of(body, passed)
            with chat.names.restored():
                admitted = await admitted_unless_client_leaves(
                    request, parts.admission.read_chat, chat.body()
                )
        generation = Generation(admitted, parts.model.name, "resp_", chat.names)
        repeated = body.model_copy(update={"input": ""})  # which may be large
        return generation, ResponsesForm(generation, repeated, parts.model.text.codec)
