"""Handlers of /v1/completions and /v1/chat/completions, and what all handlers that generate share."""

from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from router_service.answering import Answering
from router_service.body_validation import validate
from router_service.field_names import FieldNames
from router_service.generation import Generation
from router_service.openai_form import OpenAiForm
from router_service.protocol import ChatBody, CompletionBody
from router_service.request_admission import RequestAdmission, ServedModel
from router_service.request_bodies import RequestBodies

_CHAT_NAMES = FieldNames({"prompt": "messages"})
"""The engine knows prompts only."""


@dataclass(frozen=True)
class ApiParts:
    """What handlers are made of."""

    model: ServedModel
    bodies: RequestBodies
    admission: RequestAdmission
    answering: Answering


class OpenAiApi:
    """Holds no request; the engine client owns what is open."""

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts

    async def completions(self, request: Request) -> Response:
        parts = self._parts
        body = validate(CompletionBody, await parts.bodies.json(request))
        admitted = await parts.admission.completion(body)
        generation = Generation(admitted, parts.model.name, "cmpl-")
        form = OpenAiForm(generation, parts.model.text.codec, chat=False)
        return await parts.answering.answer(request, generation, form)

    async def chat_completions(self, request: Request) -> Response:
        parts = self._parts
        body = validate(ChatBody, await parts.bodies.json(request))
        admitted = await parts.admission.read_chat(body)
        generation = Generation(admitted, parts.model.name, "chatcmpl-", _CHAT_NAMES)
        form = OpenAiForm(generation, parts.model.text.codec, chat=True)
        return await parts.answering.answer(request, generation, form)
