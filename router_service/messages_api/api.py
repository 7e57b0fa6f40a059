"""Handlers of /v1/messages and /v1/messages/count_tokens: a chat in Anthropic's words."""

from fastapi import Request
from starlette.responses import Response

from router_service.generation import Generation
from router_service.messages_api.body import (
    PROMPT_OF_THE_CHAT,
    THE_CHATS,
    MessagesBody,
    PromptBody,
)
from router_service.messages_api.form import MessagesForm
from router_service.messages_api.to_chat import chat_of
from router_service.openai_api import ApiParts, admitted_unless_client_leaves
from router_service.openai_errors import json_response
from router_service.translated_chat import own_part


class MessagesApi:
    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts

    async def create(self, request: Request) -> Response:
        generation = await self._asked(request)
        form = MessagesForm(generation)
        return await self._parts.answering.answer(request, generation, form)

    async def _asked(self, request: Request) -> Generation:
        parts = self._parts
        async with parts.bodies.opened(request) as json:
            chat = chat_of(*own_part(MessagesBody, json, THE_CHATS))
            with chat.names.restored():
                admitted = await admitted_unless_client_leaves(
                    request, parts.admission.read_chat, chat.body()
                )
        return Generation(admitted, parts.model.name, "msg_", chat.names)

    async def count_tokens(self, request: Request) -> Response:
        async with self._parts.bodies.opened(request) as json:
            chat = chat_of(*own_part(PromptBody, json, PROMPT_OF_THE_CHAT))
            with chat.names.restored():
                ids = await self._parts.admission.chat_prompt(chat.body())
        return json_response({"input_tokens": len(ids)})
