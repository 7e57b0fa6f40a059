"""Handlers of /tokenize and /detokenize (vLLM's): what a prompt is made of, without generating; and of /v1/embeddings,
which a generative model has not."""

from typing import Any

from fastapi import Request
from starlette.responses import Response

from cluster.errors import RequestError
from router_service.beside_the_loop import beside_the_loop
from router_service.body_validation import validate
from router_service.openai_api import ApiParts
from router_service.openai_errors import json_response
from router_service.prompts import check_token_ids, prompt_too_long
from router_service.protocol import ChatBody
from router_service.request_admission import unknown_model
from router_service.tokenization_body import (
    THE_CHATS,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from router_service.translated_chat import own_part


class TokenizationApi:
    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts

    async def tokenize(self, request: Request) -> Response:
        async with self._parts.bodies.opened(request) as json:
            return await self._tokenized(json)

    async def _tokenized(self, json: dict[str, Any]) -> Response:
        if "prompt" in json and "messages" in json:
            raise RequestError("messages: prompt is given too; send one of them", field="messages")
        if "messages" in json:
            own, chat = own_part(TokenizeChatBody, json, THE_CHATS)
            ids = await self._chat_ids(own.model, chat)
            return await self._answer(ids, own.return_token_strs)
        text = validate(TokenizeTextBody, json)
        self._check_model(text.model)
        ids = await self._parts.admission.text_prompt(
            text.prompt, add_special_tokens=text.add_special_tokens is not False
        )
        return await self._answer(ids, text.return_token_strs)

    async def detokenize(self, request: Request) -> Response:
        """The ids are bounded as those of a prompt are."""
        async with self._parts.bodies.opened(request) as json:
            return await self._detokenized(validate(DetokenizeBody, json))

    async def _detokenized(self, body: DetokenizeBody) -> Response:
        model = self._parts.model
        self._check_model(body.model)
        if len(body.tokens) > model.max_model_len:
            size = f"{len(body.tokens)} tokens"
            raise prompt_too_long(size, model.max_model_len, field="tokens", needs_answer=False)
        check_token_ids(body.tokens, "tokens", model.vocab_size)
        codec = model.text.codec
        prompt = await beside_the_loop(len(body.tokens), lambda: codec.decode(body.tokens))
        return json_response({"prompt": prompt})

    async def embeddings(self, request: Request) -> Response:
        async with self._parts.bodies.opened(request):
            name = self._parts.model.name
        raise RequestError(
            f"model: {name} generates text and makes no embeddings; use a model that is made for them",
            field="model",
        )

    async def _chat_ids(self, model: str | None, chat: dict[str, Any]) -> list[int]:
        served = self._parts.model.name
        body = validate(ChatBody, {"model": served if model is None else model, **chat})
        return await self._parts.admission.chat_prompt(body)

    def _check_model(self, model: str | None) -> None:
        served = self._parts.model.name
        if model is not None and model != served:
            raise unknown_model(model, served)

    async def _answer(self, ids: list[int], with_strings: bool | None) -> Response:
        model = self._parts.model
        entry = model.text.codec.vocabulary_entry
        strings = await beside_the_loop(
            len(ids) if with_strings else 0,
            lambda: [entry(token_id) for token_id in ids] if with_strings else None,
        )
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return json_response(answer)
