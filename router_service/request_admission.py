"""From a typed body to a request that the engine can take: model, prompt ids, sampling, lengths.

What is refused here never reaches the engine. Long texts are tokenised on threads, so that the event loop of the
server keeps serving health probes and other streams.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.errors import RequestError, UnknownModelError
from cluster.logit_rules import LogitRules
from cluster.messages import SamplingParams
from router_service.answer_reading import PLAIN, AnswerReading
from router_service.chat_prompt import chat_prompt, num_characters
from router_service.forced_calls import forced_calls
from router_service.grammar_checks import Asker, GrammarChecks
from router_service.grammar_child import Vocabulary
from router_service.grammar_process import GrammarProcess
from router_service.model_text import ModelText
from router_service.openai_errors import ContextLengthError, safe_text
from router_service.prompts import (
    Prompt,
    TokenIdLimits,
    check_num_choices,
    context_length_is,
    parse_prompts,
    prompt_fields,
    prompt_too_long,
)
from router_service.protocol import ChatBody, CompletionBody, GenerationFields
from router_service.reasoning_grammar import ReasoningGrammar
from router_service.requested_grammar import GrammarSource, requested_grammar
from router_service.requested_reading import answer_reading
from router_service.requested_sampling import SamplingRules, requested_sampling
from router_service.routes_encoding import RouteSelection

_INLINE_CHARACTERS = 4096
"""Requests with texts up to here are tokenised on the event loop (below a millisecond or two)."""
_DEFAULT_COMPLETION_TOKENS = 16

T = TypeVar("T")


@dataclass(frozen=True)
class AdmittedRequest:
    """Checked and tokenised. `sampling` has one entry per prompt, because max_tokens may depend on its length."""

    prompts: list[list[int]]
    num_choices: int
    """Of each prompt; answers number them prompt by prompt."""
    num_logprobs: int | None
    """Alternatives listed with each output token's log-prob; None: no log-probs."""
    num_prompt_logprobs: int | None
    """Alternatives listed with each prompt token's log-prob in `prompt_logprobs`; None: that is not asked."""
    echoes: bool
    """The prompt comes first in every choice."""
    sampling: list[SamplingParams]
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Chunks tell the counts so far."""
    return_token_ids: bool
    routes: RouteSelection | None
    cache_salt: str | None
    priority: int
    grammar_field: str | None = None
    """Of the body, which asked for the grammar that the answer is held to."""
    reading: AnswerReading = PLAIN
    """Of what is generated."""
    prompts_sent: tuple[str | None, ...] = ()
    """Of each prompt that is echoed the text that it was sent as; None: it was sent as token ids."""

    @property
    def num_prompt_alternatives(self) -> int | None:
        """Alternatives that the engine has to list with each prompt token; None: prompts are not scored."""
        asked = [self.num_prompt_logprobs, self.num_logprobs if self.echoes else None]
        return max((count for count in asked if count is not None), default=None)


@dataclass(frozen=True)
class ServedModel:
    """What admission knows of the model."""

    model_dir: Path
    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    text: ModelText


class RequestAdmission:
    """Stateless but for its two tokeniser threads and the process that checks grammars."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        vocabulary = Vocabulary(str(model.model_dir), model.vocab_size, model.eos_token_ids)
        self._grammars = GrammarChecks(GrammarProcess(vocabulary))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def completion(self, body: CompletionBody, tenant: str | None) -> AdmittedRequest:
        """Raises RequestError, UnknownModelError, ContextLengthError."""
        self._check_model(body)
        model = self._model
        limits = TokenIdLimits(
            model.vocab_size, model.max_model_len, min_answer_tokens=int(body.max_tokens != 0)
        )
        prompts = parse_prompts(body.prompt, limits)
        check_num_choices(len(prompts), body.num_choices)
        fields = prompt_fields(body.prompt)
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        pairs = zip(prompts, fields, strict=True)
        ids = [await self._prompt_ids(*pair, size) for pair in pairs]
        admitted = await self._admit(
            body,
            tenant,
            ids,
            fields=fields,
            default=_DEFAULT_COMPLETION_TOKENS,
            source=requested_grammar(body),
        )
        if not admitted.echoes:
            return admitted
        sent = tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)
        return replace(admitted, prompts_sent=sent)

    async def chat(self, body: ChatBody, tenant: str | None) -> AdmittedRequest:
        """One whose answer is text. Raises RequestError, UnknownModelError, ContextLengthError."""
        if body.offered_tools:
            raise RequestError("tools: calls of tools are not told here", field="tools")
        ids = await self.chat_prompt(body)
        source = requested_grammar(body)
        return await self._admit(
            body, tenant, [ids], fields=["messages"], default=None, source=source
        )

    async def read_chat(self, body: ChatBody, tenant: str | None) -> AdmittedRequest:
        """One whose answer is sorted: reasoning, content, tool calls. Raises as `chat` does."""
        text, model_text = await self._chat_text(body), self._model.text
        size = num_characters(body)
        reading = await self._run(size, lambda: answer_reading(body, text, model_text))
        source = await self._run(size, lambda: _chat_grammar(body, reading, model_text))
        ids = await self._chat_ids(text)
        admitted = await self._admit(
            body, tenant, [ids], fields=["messages"], default=None, source=source
        )
        return replace(admitted, reading=reading)

    async def chat_prompt(self, body: ChatBody) -> list[int]:
        """Its token ids, at least one. Raises RequestError, UnknownModelError, ContextLengthError."""
        return await self._chat_ids(await self._chat_text(body))

    async def _chat_text(self, body: ChatBody) -> str:
        self._check_model(body)
        template, parsers = self._model.text.chat_template, self._model.text.parsers
        if template is None:
            raise RequestError("the model has no chat template; use /v1/completions")
        reasons = parsers.reasoning is not None
        size = num_characters(body)
        return await self._run(size, lambda: chat_prompt(body, template, reasons=reasons))

    async def _chat_ids(self, text: str) -> list[int]:
        self._check_characters(text, field="messages")
        ids = await self._encode(text, len(text), add_special_tokens=False, field="messages")
        if not ids:
            raise RequestError("the messages make an empty prompt", field="messages")
        return ids

    async def text_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a completion's prompt, perhaps none. Raises RequestError, ContextLengthError."""
        self._check_characters(text, field="prompt")
        return await self._encode(
            text, len(text), add_special_tokens=add_special_tokens, field="prompt"
        )

    def _check_model(self, body: GenerationFields) -> None:
        if body.model != self._model.name:
            raise unknown_model(body.model, self._model.name)

    async def _prompt_ids(self, prompt: Prompt, field: str, size: int) -> list[int]:
        """size: characters of all prompts of the request."""
        if isinstance(prompt, list):
            return prompt
        self._check_characters(prompt, field=field)
        return await self._encode(prompt, size, add_special_tokens=True, field=field)

    async def _encode(
        self, text: str, size: int, *, add_special_tokens: bool, field: str
    ) -> list[int]:
        """Ids that the model has: a tokenizer may know more of them, and one of those would end the cell.

        size: characters of the request, which together decide whether a thread is worth it.
        """
        codec, vocab_size = self._model.text.codec, self._model.vocab_size
        ids = await self._run(
            size, lambda: codec.encode(text, add_special_tokens=add_special_tokens)
        )
        largest = max(ids, default=0)
        if largest >= vocab_size:
            raise RequestError(
                f"{field}: the text holds a token with id {largest}; the model's ids are from 0 to "
                f"{vocab_size - 1}",
                field=field,
            )
        return ids

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        if num_characters <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_characters(self, text: str, *, field: str) -> None:
        """Refuses a text whose length alone proves that it does not fit, before any work is done for it."""
        per_token = self._model.text.codec.max_characters_per_token
        limit = self._model.max_model_len
        if per_token is not None and len(text) > per_token * limit:
            size = f"{len(text)} characters (over {len(text) // per_token} tokens)"
            raise prompt_too_long(size, limit, field=field)

    async def _admit(
        self,
        body: GenerationFields,
        tenant: str | None,
        prompts: list[list[int]],
        *,
        fields: list[str],
        default: int | None,
        source: GrammarSource | None,
    ) -> AdmittedRequest:
        """fields: where each prompt stands in the body."""
        model = self._model
        rules = SamplingRules(
            model.vocab_size,
            model.eos_token_ids,
            model.text.defaults,
            encode=partial(model.text.codec.encode, add_special_tokens=False),
        )
        logit_rules = await self._logit_rules(body, rules)
        if source is not None:
            grammar = await self._grammars.checked(source, Asker(tenant, body.cache_salt))
            logit_rules = msgspec.structs.replace(logit_rules, grammar=grammar)
        sampling = [
            requested_sampling(
                body, rules, logit_rules, self._max_tokens(body, len(ids), field, default)
            )
            for ids, field in zip(prompts, fields, strict=True)
        ]
        return AdmittedRequest(
            prompts=prompts,
            num_choices=body.num_choices,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            echoes=body.echoes,
            sampling=sampling,
            stop=tuple(body.stop or ()),
            stream=bool(body.stream),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            return_token_ids=bool(body.return_token_ids),
            routes=_route_selection(body),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            grammar_field=None if source is None else source.field,
        )

    async def _logit_rules(self, body: GenerationFields, rules: SamplingRules) -> LogitRules:
        num_characters = 2 * sum(map(len, body.bad_words or ()))
        return await self._run(num_characters, lambda: rules.logit_rules(body))

    def _max_tokens(
        self, body: GenerationFields, num_prompt_tokens: int, field: str, default: int | None
    ) -> int:
        limit = self._model.max_model_len
        room = limit - num_prompt_tokens
        name, requested = body.max_tokens_field, body.requested_max_tokens
        if room < (requested != 0):
            size = f"{num_prompt_tokens} tokens"
            raise prompt_too_long(size, limit, field=field, needs_answer=requested != 0)
        if requested is None:
            return room if default is None else min(default, room)
        if requested > room:
            raise ContextLengthError(
                f"{name}: {context_length_is(limit)}, which {num_prompt_tokens} prompt tokens and "
                f"{name} {safe_text(requested)} do not fit; ask for at most {room}",
                field=name,
            )
        return requested


def unknown_model(name: str, served: str) -> UnknownModelError:
    return UnknownModelError(
        f"model {safe_text(name)} does not exist; served: {served}", field="model"
    )


def _chat_grammar(body: ChatBody, reading: AnswerReading, text: ModelText) -> GrammarSource | None:
    """Of calls that have to be made, or what was asked for, behind the reasoning."""
    layout, token_ids = text.parsers.call_layout, text.codec.added_token_ids
    if layout is not None and body.forces_calls:
        return forced_calls(body, layout, token_ids, reading.reasoning)
    source = requested_grammar(body)
    if source is None:
        return None
    return replace(source, preface=ReasoningGrammar(token_ids, reading.reasoning).preface)


def _route_selection(body: GenerationFields) -> RouteSelection | None:
    if not body.return_routed_experts:
        return None
    return RouteSelection(
        weights=body.return_routed_experts == "weights",
        start=body.routed_experts_start or 0,
        end=body.routed_experts_end,
    )
