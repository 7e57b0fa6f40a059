"""Handlers of /v1/completions and /v1/chat/completions, and what all handlers that generate share."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from router_service.answering import Answering
from router_service.body_validation import validate
from router_service.field_names import FieldNames
from router_service.generation import Generation
from router_service.openai_form import OpenAiForm
from router_service.protocol import ChatBody, CompletionBody
from router_service.request_admission import AdmittedRequest, RequestAdmission, ServedModel
from router_service.request_bodies import RequestBodies
from router_service.streaming import unless_client_leaves
from router_service.visits import visit_of

B = TypeVar("B")

_CHAT_NAMES = FieldNames({"prompt": "messages"})
"""The engine knows prompts only."""


@dataclass(frozen=True)
class ApiParts:
    """What handlers are made of."""

    model: ServedModel
    bodies: RequestBodies
    admission: RequestAdmission
    answering: Answering


async def admitted_unless_client_leaves(
    request: Request,
    admit: Callable[[B, str | None], Coroutine[Any, Any, AdmittedRequest]],
    body: B,
) -> AdmittedRequest:
    """As `admit`, a method of RequestAdmission, has it; in the name of whoever asks. Raises ClientLeft."""
    tenant = visit_of(request.scope).caller.tenant
    return await unless_client_leaves(request.receive, admit(body, tenant))


class OpenAiApi:
    """Holds no request; the engine client owns what is open."""

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, await self._completion(request), chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, await self._chat(request), chat=True)

    async def _completion(self, request: Request) -> Generation:
        async with self._parts.bodies.opened(request) as body:
            admitted = await admitted_unless_client_leaves(
                request, self._parts.admission.completion, validate(CompletionBody, body)
            )
        return Generation(admitted, self._parts.model.name, "cmpl-")

    async def _chat(self, request: Request) -> Generation:
        async with self._parts.bodies.opened(request) as body:
            admitted = await admitted_unless_client_leaves(
                request, self._parts.admission.read_chat, validate(ChatBody, body)
            )
        return Generation(admitted, self._parts.model.name, "chatcmpl-", _CHAT_NAMES)

    async def _answer(self, request: Request, generation: Generation, *, chat: bool) -> Response:
        form = OpenAiForm(generation, self._parts.model.text.codec, chat=chat)
        return await self._parts.answering.answer(request, generation, form)
