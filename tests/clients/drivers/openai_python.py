"""The openai SDK for Python, blocking and async: its objects hold what plain HTTP says, its exceptions the errors."""

import asyncio
import sys
from typing import Any

import openai
import openai_agents
from checking import MOST_CHOICES, Server, raised, run_checks, same, some, without
from openai import AsyncOpenAI
from openai_client import client_of, finish_reasons, same_body
from questions import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETION_PATH,
    DRAWN,
    EXTRAS,
    PROMPTS,
    TOO_MANY_TOKENS,
    stop_within,
)


def models(server: Server) -> None:
    client = client_of(server)
    (card,) = client.models.list()
    same(card.id, server.model, "the model listed")
    same(client.models.retrieve(server.model), card, "the model retrieved")


def chat(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **CHAT)
    answer = client_of(server).chat.completions.create(model=server.model, **CHAT)
    some(answer.choices[0].message.content, "the text")
    some(answer.usage and answer.usage.prompt_tokens_details.cached_tokens, "cached_tokens")
    same_body(answer, wanted)


def completion(server: Server) -> None:
    wanted = server.settled(COMPLETION_PATH, **COMPLETION)
    answer = client_of(server).completions.create(model=server.model, **COMPLETION)
    some(answer.choices[0].text, "the text")
    same_body(answer, wanted)


def chat_stream(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **CHAT)
    stream = client_of(server).chat.completions.create(
        model=server.model, **CHAT, stream=True, stream_options={"include_usage": True}
    )
    same_chat(list(stream), wanted)


def same_chat(chunks: list[Any], wanted: dict[str, Any]) -> None:
    same(len({chunk.id for chunk in chunks}), 1, "the number of ids")
    *told, last = chunks
    (choice,) = wanted["choices"]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in told)
    same(text, choice["message"]["content"], "the joined text")
    same(told[0].choices[0].delta.role, "assistant", "the first role")
    same(finish_reasons(told), [choice["finish_reason"]], "what ends it")
    same(last.choices, [], "choices of the usage chunk")
    same(last.usage.model_dump(exclude_unset=True), wanted["usage"], "the usage")


def completion_stream(server: Server) -> None:
    wanted = server.settled(COMPLETION_PATH, **COMPLETION)
    stream = client_of(server).completions.create(model=server.model, **COMPLETION, stream=True)
    chunks = list(stream)
    (choice,) = wanted["choices"]
    same("".join(chunk.choices[0].text for chunk in chunks), choice["text"], "the joined text")
    same(finish_reasons(chunks), [choice["finish_reason"]], "what ends it")
    same([chunk.usage for chunk in chunks if chunk.usage], [], "usage that nobody asked for")


def chat_stream_helper(server: Server) -> None:
    """The SDK joins the chunks itself."""
    wanted = server.settled(CHAT_PATH, **CHAT, logprobs=True, top_logprobs=2)
    with client_of(server).chat.completions.stream(
        model=server.model,
        **CHAT,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    for kind in ("content.delta", "content.done", "logprobs.content.delta"):
        some(events.count(kind), f"events {kind}")
    (choice,), (wanted_choice,) = final.choices, wanted["choices"]
    same(choice.message.content, wanted_choice["message"]["content"], "the text")
    same(choice.finish_reason, wanted_choice["finish_reason"], "what ended it")
    logprobs = choice.logprobs.model_dump(exclude_unset=True)
    same(logprobs["content"], wanted_choice["logprobs"]["content"], "the log-probs")
    same(final.usage.model_dump(exclude_unset=True), wanted["usage"], "the usage")


def several_prompts(server: Server) -> None:
    fields = {**COMPLETION, "prompt": PROMPTS}
    wanted = server.settled(COMPLETION_PATH, **fields)
    answer = client_of(server).completions.create(model=server.model, **fields)
    same([choice.index for choice in answer.choices], [0, 1, 2], "the indices")
    same_body(answer, wanted)


def token_ids(server: Server) -> None:
    """Prompts as ids, and fields that OpenAI has not."""
    fields = {**COMPLETION, "prompt": [[17, 400, 1200], [90, 91, 92, 93]]}
    extra = {"return_token_ids": True, "ignore_eos": True}
    wanted = server.settled(COMPLETION_PATH, **fields, **extra)
    answer = client_of(server).completions.create(model=server.model, **fields, extra_body=extra)
    same([len(choice.token_ids) for choice in answer.choices], [40, 40], "the numbers of ids")
    same_body(answer, wanted)


def extra_fields(server: Server) -> None:
    """On chats and completions; in a stream, which has no log-probs of the prompt, experts come with the last chunk."""
    client = client_of(server)
    wanted = server.settled(CHAT_PATH, **CHAT, **EXTRAS)
    answer = client.chat.completions.create(model=server.model, **CHAT, extra_body=EXTRAS)
    same_body(answer, wanted)
    (choice,), counts = answer.choices, answer.usage
    same(len(choice.token_ids), counts.completion_tokens, "the number of ids")
    same(len(answer.prompt_token_ids), counts.prompt_tokens, "the number of the prompt's ids")
    same(len(answer.prompt_logprobs), counts.prompt_tokens, "the number of its log-probs")
    same(choice.routed_range, [0, counts.total_tokens - 1], "the range of the experts")
    wanted = server.settled(COMPLETION_PATH, **COMPLETION, **EXTRAS)
    create = client.completions.create
    same_body(create(model=server.model, **COMPLETION, extra_body=EXTRAS), wanted)
    streamed = without(EXTRAS, "prompt_logprobs")
    chunks = list(create(model=server.model, **COMPLETION, extra_body=streamed, stream=True))
    told = [chunk.choices[0].model_dump() for chunk in chunks]
    for name in ("routed_experts", "routed_weights", "routed_range"):
        values = [choice[name] for choice in told if choice.get(name)]
        same(values, [wanted["choices"][0][name]], f"{name} of the stream")
    ids = [token_id for choice in told for token_id in choice.get("token_ids") or []]
    same(ids, wanted["choices"][0]["token_ids"], "the joined ids")


def stop(server: Server) -> None:
    whole = server.settled(CHAT_PATH, **CHAT)["choices"][0]["message"]["content"]
    stop = stop_within(whole)
    client = client_of(server)
    answer = client.chat.completions.create(model=server.model, **CHAT, stop=[stop, "\n\n\n"])
    same(answer.choices[0].message.content, whole.partition(stop)[0], "the text before the stop")
    same(answer.choices[0].finish_reason, "stop", "what ended it")
    chunks = list(
        client.chat.completions.create(model=server.model, **CHAT, stop=stop, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    same(text, whole.partition(stop)[0], "the streamed text before the stop")
    same(finish_reasons(chunks), ["stop"], "what ends the stream")


def logprobs(server: Server) -> None:
    client = client_of(server)
    asked: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(model=server.model, **asked)
    same_body(answer, server.settled(CHAT_PATH, **asked))
    content = answer.choices[0].logprobs.content
    text = b"".join(bytes(token.bytes) for token in content).decode()
    some(text.startswith(answer.choices[0].message.content), "tokens that make the text")
    scored: dict[str, Any] = {**COMPLETION, "logprobs": 2, "echo": True, "max_tokens": 4}
    wanted = server.settled(COMPLETION_PATH, **scored)
    again = client.completions.create(model=server.model, **scored)
    same_body(again, wanted)
    same(again.choices[0].logprobs.token_logprobs[0], None, "the first log-prob of an echo")


def choices(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **DRAWN)
    client = client_of(server)
    answer = client.chat.completions.create(model=server.model, **DRAWN)
    same_body(answer, wanted)
    texts = {index: "" for index in range(3)}
    for chunk in client.chat.completions.create(model=server.model, **DRAWN, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    same(list(texts.values()), [c.message.content for c in answer.choices], "the streamed texts")
    some(len(set(texts.values())) > 1, "choices that differ")


def same_error(error: openai.APIStatusError, wanted: dict[str, Any]) -> None:
    same(error.body, wanted, "the error object")
    same(
        (error.param, error.code, error.type),
        tuple(wanted[n] for n in ("param", "code", "type")),
        "its fields",
    )


def error_400(server: Server) -> None:
    client = client_of(server)
    wanted = server.refusal(CHAT_PATH, 400, **{**CHAT, "temperature": 3.0})
    for stream in (False, True):
        error = raised(
            lambda stream=stream: client.chat.completions.create(
                model=server.model, **{**CHAT, "temperature": 3.0}, stream=stream
            ),
            openai.BadRequestError,
        )
        same_error(error, wanted)
        same(error.param, "temperature", "the field that is named")
    error = raised(
        lambda: client.completions.create(
            model=server.model, **{**COMPLETION, "max_tokens": TOO_MANY_TOKENS}
        ),
        openai.BadRequestError,
    )
    same(error.code, "context_length_exceeded", "the code of an answer that is too long")


def error_401(server: Server) -> None:
    wanted = server.refusal(CHAT_PATH, 401, api_key="not a key", **CHAT)
    client = client_of(server, api_key="not a key")
    error = raised(
        lambda: client.chat.completions.create(model=server.model, **CHAT),
        openai.AuthenticationError,
    )
    same_error(error, wanted)
    raised(client.models.list, openai.AuthenticationError)


def error_404(server: Server) -> None:
    client = client_of(server)
    wanted = server.refusal(CHAT_PATH, 404, **{**CHAT, "model": "no-such-model"})
    error = raised(
        lambda: client.chat.completions.create(model="no-such-model", **CHAT), openai.NotFoundError
    )
    same_error(error, wanted)
    raised(lambda: client.models.retrieve("no-such-model"), openai.NotFoundError)
    raised(
        lambda: client.images.generate(model=server.model, prompt="an owl"), openai.NotFoundError
    )


def error_429(server: Server) -> None:
    asked: dict[str, Any] = {**CHAT, "n": MOST_CHOICES, "max_tokens": 1}
    wanted = server.refusal(CHAT_PATH, 429, **asked)
    error = raised(
        lambda: client_of(server).chat.completions.create(model=server.model, **asked),
        openai.RateLimitError,
    )
    same_error(error, wanted)
    some(error.response.headers.get("retry-after"), "Retry-After")


def leaving(server: Server) -> None:
    """A stream that is closed early ends the request."""
    before = server.metrics()
    with client_of(server).completions.create(
        model=server.model,
        prompt="Once upon a time",
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
    server.wait_until_idle()
    name = 'requests_finished_total{reason="abort"}'
    same(server.metrics()[name] - before.get(name, 0.0), 1.0, "the number of aborts")


def concurrent(server: Server) -> None:
    """Sixteen at once on one async client."""
    wanted = [
        server.settled(COMPLETION_PATH, **{**COMPLETION, "prompt": prompt})["choices"][0]["text"]
        for prompt in PROMPTS
    ]

    async def texts() -> list[str]:
        async with AsyncOpenAI(
            base_url=server.base_url, api_key=server.api_key, max_retries=0
        ) as client:
            answers = [
                client.completions.create(
                    model=server.model, **{**COMPLETION, "prompt": PROMPTS[number % 3]}
                )
                for number in range(16)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    same(asyncio.run(texts()), [wanted[number % 3] for number in range(16)], "the texts")


def async_stream(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **CHAT)

    async def chunks() -> list[Any]:
        async with AsyncOpenAI(
            base_url=server.base_url, api_key=server.api_key, max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                model=server.model, **CHAT, stream=True, stream_options={"include_usage": True}
            )
            return [chunk async for chunk in stream]

    same_chat(asyncio.run(chunks()), wanted)


CHECKS = [
    ("models", models),
    ("chat", chat),
    ("chat stream", chat_stream),
    ("chat stream helper", chat_stream_helper),
    ("completion", completion),
    ("completion stream", completion_stream),
    ("several prompts", several_prompts),
    ("token ids", token_ids),
    ("token ids, prompt log-probs, experts in extra_body", extra_fields),
    ("stop", stop),
    ("log-probs, echo", logprobs),
    ("seeded choices", choices),
    ("16 async at once", concurrent),
    ("async stream", async_stream),
    ("leaving a stream", leaving),
    *openai_agents.CHECKS,
    ("400", error_400),
    ("401", error_401),
    ("404", error_404),
    ("429", error_429),
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
