"""LiteLLM as a library, for any OpenAI-compatible server (`openai/…`) and for one of vLLM's kind (`hosted_vllm/…`)."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import litellm
from checking import MOST_CHOICES, Server, raised, run_checks, same, some
from questions import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETION_PATH,
    DRAWN,
    PROMPTS,
    TOO_MANY_TOKENS,
    stop_within,
)

litellm.telemetry = False
litellm.suppress_debug_info = True
PROVIDERS = ("openai", "hosted_vllm")


def options_of(server: Server, provider: str = "openai", **others: Any) -> dict[str, Any]:
    fields = {
        "model": f"{provider}/{server.model}",
        "api_base": server.base_url,
        "api_key": server.api_key,
        "num_retries": 0,
        "max_retries": 0,
    }
    return fields | others


def same_usage(usage: Any, wanted: dict[str, Any]) -> None:
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        same(usage[name], wanted[name], name)
    cached = wanted["prompt_tokens_details"]["cached_tokens"]
    same(usage.prompt_tokens_details.cached_tokens, cached, "cached_tokens")


def chat_with(provider: str) -> Callable[[Server], None]:
    def chat(server: Server) -> None:
        wanted = server.settled(CHAT_PATH, **CHAT)
        answer = litellm.completion(**options_of(server, provider), **CHAT)
        (choice,) = wanted["choices"]
        some(choice["message"]["content"], "the text")
        same(answer.choices[0].message.content, choice["message"]["content"], "the text")
        same(answer.choices[0].finish_reason, choice["finish_reason"], "what ended it")
        same_usage(answer.usage, wanted["usage"])

    return chat


def chat_stream_with(provider: str) -> Callable[[Server], None]:
    def chat_stream(server: Server) -> None:
        wanted = server.settled(CHAT_PATH, **CHAT)
        stream = litellm.completion(
            **options_of(server, provider),
            **CHAT,
            stream=True,
            stream_options={"include_usage": True},
        )
        same_stream(list(stream), wanted)

    return chat_stream


def same_stream(chunks: list[Any], wanted: dict[str, Any]) -> None:
    (choice,) = wanted["choices"]
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(choice.delta.content or "" for choice in told)
    same(text, choice["message"]["content"], "the joined text")
    reasons = [choice.finish_reason for choice in told if choice.finish_reason]
    same(reasons, [choice["finish_reason"]], "what ends it")
    same_usage(chunks[-1].usage, wanted["usage"])
    rebuilt = litellm.stream_chunk_builder(chunks)
    same(rebuilt.choices[0].message.content, choice["message"]["content"], "the rebuilt text")


def completion(server: Server) -> None:
    wanted = server.settled(COMPLETION_PATH, **COMPLETION)
    options = options_of(server, "text-completion-openai")
    answer = litellm.text_completion(**options, **COMPLETION)
    same(answer.choices[0].text, wanted["choices"][0]["text"], "the text")
    same_usage(answer.usage, wanted["usage"])
    stream = litellm.text_completion(**options, **COMPLETION, stream=True)
    text = "".join(chunk.choices[0].text or "" for chunk in stream if chunk.choices)
    same(text, wanted["choices"][0]["text"], "the joined text")


def stop(server: Server) -> None:
    whole = server.settled(CHAT_PATH, **CHAT)["choices"][0]["message"]["content"]
    stop = stop_within(whole)
    answer = litellm.completion(**options_of(server), **CHAT, stop=[stop])
    same(answer.choices[0].message.content, whole.partition(stop)[0], "the text before the stop")
    same(answer.choices[0].finish_reason, "stop", "what ended it")


def logprobs(server: Server) -> None:
    asked: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 3}
    wanted = server.settled(CHAT_PATH, **asked)["choices"][0]["logprobs"]
    answer = litellm.completion(**options_of(server), **asked)
    some(wanted["content"], "the log-probs")
    got = answer.choices[0].logprobs.model_dump()
    same(got["content"], wanted["content"], "the log-probs")


def choices(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **DRAWN)
    answer = litellm.completion(**options_of(server), **DRAWN)
    texts = [choice.message.content for choice in answer.choices]
    same(texts, [choice["message"]["content"] for choice in wanted["choices"]], "the texts")
    some(len(set(texts)) > 1, "choices that differ")


def extra_fields(server: Server) -> None:
    """Fields that OpenAI has not."""
    extra = {"top_k": 1, "min_tokens": 5, "return_token_ids": True}
    asked: dict[str, Any] = {**CHAT, "temperature": 1.0, "seed": 3}
    wanted = server.settled(CHAT_PATH, **asked, **extra)
    answer = litellm.completion(**options_of(server, "hosted_vllm"), **asked, extra_body=extra)
    same(answer.choices[0].message.content, wanted["choices"][0]["message"]["content"], "the text")
    provider_fields = answer.choices[0].provider_specific_fields
    same(provider_fields["token_ids"], wanted["choices"][0]["token_ids"], "the token ids")


def concurrent(server: Server) -> None:
    """Nine at once."""
    asked = [{**CHAT, "messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS * 3]
    wanted = [
        server.settled(CHAT_PATH, **fields)["choices"][0]["message"]["content"] for fields in asked
    ]

    async def texts() -> list[str]:
        answers = [litellm.acompletion(**options_of(server), **fields) for fields in asked]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*answers)]

    same(asyncio.run(texts()), wanted, "the texts")


def refused(server: Server, kind: type[Exception], wanted: dict[str, Any], **fields: Any) -> None:
    for provider in PROVIDERS:
        error = raised(
            lambda provider=provider: litellm.completion(
                **{**options_of(server, provider), **CHAT, **fields}
            ),
            kind,
        )
        some(wanted["message"] in str(error), f"the server's message in {error}")


def error_400(server: Server) -> None:
    wanted = server.refusal(CHAT_PATH, 400, **{**CHAT, "temperature": 3.0})
    refused(server, litellm.BadRequestError, wanted, temperature=3.0)


def error_context(server: Server) -> None:
    """LiteLLM has a class of its own for it, which it tells by the message."""
    wanted = server.refusal(CHAT_PATH, 400, **{**CHAT, "max_tokens": TOO_MANY_TOKENS})
    refused(server, litellm.ContextWindowExceededError, wanted, max_tokens=TOO_MANY_TOKENS)


def error_401(server: Server) -> None:
    wanted = server.refusal(CHAT_PATH, 401, api_key="not a key", **CHAT)
    refused(server, litellm.AuthenticationError, wanted, api_key="not a key")


def error_404(server: Server) -> None:
    wanted = server.refusal(CHAT_PATH, 404, **{**CHAT, "model": "no-such-model"})
    error = raised(
        lambda: litellm.completion(**options_of(server, model="openai/no-such-model"), **CHAT),
        litellm.NotFoundError,
    )
    some(wanted["message"] in str(error), f"the server's message in {error}")


def error_429(server: Server) -> None:
    asked = {"n": MOST_CHOICES, "max_tokens": 1}
    wanted = server.refusal(CHAT_PATH, 429, **{**CHAT, **asked})
    refused(server, litellm.RateLimitError, wanted, **asked)


CHECKS = [
    *((f"chat {provider}", chat_with(provider)) for provider in PROVIDERS),
    *((f"chat stream {provider}", chat_stream_with(provider)) for provider in PROVIDERS),
    ("completion and stream", completion),
    ("stop", stop),
    ("log-probs", logprobs),
    ("seeded choices", choices),
    ("extra fields", extra_fields),
    ("9 async at once", concurrent),
    ("400", error_400),
    ("400 context", error_context),
    ("401", error_401),
    ("404", error_404),
    ("429", error_429),
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
