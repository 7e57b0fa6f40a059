"""langchain-openai: ChatOpenAI and OpenAI of LangChain, blocking and async, with whatever they send by themselves."""

import asyncio
import sys
from typing import Any

from checking import MOST_CHOICES, Server, raised, run_checks, same, some
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from langchain_openai.chat_models.base import (
    OpenAIAuthenticationError,
    OpenAIContextOverflowError,
    OpenAIInvalidRequestError,
    OpenAIModelNotFoundError,
    OpenAIRateLimitError,
)
from questions import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETION_PATH,
    DRAWN,
    PROMPTS,
    stop_within,
)

SYSTEM, USER = (message["content"] for message in CHAT["messages"])
MESSAGES = [SystemMessage(SYSTEM), HumanMessage(USER)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": CHAT["max_tokens"]}


def chat_of(server: Server, **fields: Any) -> ChatOpenAI:
    options = {
        "model": server.model,
        "base_url": server.base_url,
        "api_key": server.api_key,
        "max_retries": 0,
        "use_responses_api": False,
        **GREEDY,
    }
    return ChatOpenAI(**(options | fields))


def same_usage(usage: Any, wanted: dict[str, Any]) -> None:
    same(usage["input_tokens"], wanted["prompt_tokens"], "input_tokens")
    same(usage["output_tokens"], wanted["completion_tokens"], "output_tokens")
    same(usage["total_tokens"], wanted["total_tokens"], "total_tokens")
    cached = wanted["prompt_tokens_details"]["cached_tokens"]
    same(usage["input_token_details"]["cache_read"], cached, "cache_read")


def invoke(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **CHAT)
    answer = chat_of(server).invoke(MESSAGES)
    (choice,) = wanted["choices"]
    some(answer.content, "the text")
    same(answer.content, choice["message"]["content"], "the text")
    same(answer.response_metadata["finish_reason"], choice["finish_reason"], "what ended it")
    same(answer.response_metadata["model_name"], server.model, "the model")
    same_usage(answer.usage_metadata, wanted["usage"])


def stream(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **CHAT)
    chunks = list(chat_of(server, stream_usage=True).stream(MESSAGES))
    same_chunks(chunks, wanted)


def same_chunks(chunks: list[Any], wanted: dict[str, Any]) -> None:
    (choice,) = wanted["choices"]
    some(len(chunks) > 3, "chunks")
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    same(joined.content, choice["message"]["content"], "the joined text")
    same(joined.response_metadata["finish_reason"], choice["finish_reason"], "what ends it")
    same_usage(joined.usage_metadata, wanted["usage"])


def async_stream(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **CHAT)

    async def chunks() -> list[Any]:
        chat = chat_of(server, stream_usage=True)
        return [chunk async for chunk in chat.astream(MESSAGES)]

    same_chunks(asyncio.run(chunks()), wanted)


def chain(server: Server) -> None:
    """Prompt template, model and parser; a batch of three at once."""
    template = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", "{question}")])
    made = template | chat_of(server) | StrOutputParser()
    wanted = []
    for question in PROMPTS:
        messages = [CHAT["messages"][0], {"role": "user", "content": question}]
        answer = server.settled(CHAT_PATH, **{**CHAT, "messages": messages})
        wanted.append(answer["choices"][0]["message"]["content"])
    same(made.batch([{"question": question} for question in PROMPTS]), wanted, "the texts")


def completion(server: Server) -> None:
    wanted = server.settled(COMPLETION_PATH, **COMPLETION)
    text = wanted["choices"][0]["text"]
    model = OpenAI(
        model=server.model,
        base_url=server.base_url,
        api_key=server.api_key,
        max_retries=0,
        temperature=0.0,
        max_tokens=COMPLETION["max_tokens"],
    )
    some(text, "the text")
    same(model.invoke(COMPLETION["prompt"]), text, "the text")
    same("".join(model.stream(COMPLETION["prompt"])), text, "the joined text")
    prompts = [COMPLETION["prompt"], *PROMPTS]
    several = server.settled(COMPLETION_PATH, **{**COMPLETION, "prompt": prompts})
    generated = [choices[0].text for choices in model.generate(prompts).generations]
    same(generated, [choice["text"] for choice in several["choices"]], "the texts")


def stop(server: Server) -> None:
    whole = server.settled(CHAT_PATH, **CHAT)["choices"][0]["message"]["content"]
    stop = stop_within(whole)
    answer = chat_of(server).invoke(MESSAGES, stop=[stop])
    same(answer.content, whole.partition(stop)[0], "the text before the stop")
    same(answer.response_metadata["finish_reason"], "stop", "what ended it")
    text = "".join(chunk.content for chunk in chat_of(server).stream(MESSAGES, stop=[stop]))
    same(text, whole.partition(stop)[0], "the streamed text before the stop")


def logprobs(server: Server) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    wanted = server.settled(CHAT_PATH, **CHAT, **asked)["choices"][0]["logprobs"]
    answer = chat_of(server, **asked).invoke(MESSAGES)
    some(wanted["content"], "the log-probs")
    same(answer.response_metadata["logprobs"]["content"], wanted["content"], "the log-probs")


def choices(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **DRAWN)
    names = ("temperature", "seed", "n", "max_tokens")
    chat = chat_of(server, **{name: DRAWN[name] for name in names})
    (generations,) = chat.generate([[HumanMessage(DRAWN["messages"][0]["content"])]]).generations
    texts = [generation.text for generation in generations]
    same(texts, [choice["message"]["content"] for choice in wanted["choices"]], "the texts")
    some(len(set(texts)) > 1, "choices that differ")


def extra_fields(server: Server) -> None:
    extra = {"min_tokens": 30, "ignore_eos": True, "cache_salt": "one"}
    wanted = server.settled(CHAT_PATH, **CHAT, **extra)["choices"][0]
    answer = chat_of(server, extra_body=extra).invoke(MESSAGES)
    same(answer.content, wanted["message"]["content"], "the text")
    same(answer.response_metadata["finish_reason"], "length", "what ended it")


def refused(server: Server, kind: type[Exception], wanted: dict[str, Any], **fields: Any) -> None:
    chat = chat_of(server, **fields)
    for call in (lambda: chat.invoke(MESSAGES), lambda: list(chat.stream(MESSAGES))):
        same(raised(call, kind).body, wanted, "the error object")


def error_400(server: Server) -> None:
    wanted = server.refusal(CHAT_PATH, 400, **{**CHAT, "temperature": 3.0})
    refused(server, OpenAIInvalidRequestError, wanted, temperature=3.0)


def error_context(server: Server) -> None:
    """LangChain has a class of its own for a prompt that is too long, which it tells by the message."""
    too_long = "word " * server.get(f"/v1/models/{server.model}")["max_model_len"]
    error = raised(lambda: chat_of(server).invoke(too_long), OpenAIContextOverflowError)
    some("maximum context length" in str(error), f"the limit in {error}")


def error_401(server: Server) -> None:
    wanted = server.refusal(CHAT_PATH, 401, api_key="not a key", **CHAT)
    refused(server, OpenAIAuthenticationError, wanted, api_key="not a key")


def error_404(server: Server) -> None:
    wanted = server.refusal(CHAT_PATH, 404, **{**CHAT, "model": "no-such-model"})
    refused(server, OpenAIModelNotFoundError, wanted, model="no-such-model")


def error_429(server: Server) -> None:
    asked: dict[str, Any] = {"n": MOST_CHOICES, "max_tokens": 1}
    wanted = server.refusal(CHAT_PATH, 429, **{**CHAT, **asked})
    error = raised(lambda: chat_of(server, **asked).invoke(MESSAGES), OpenAIRateLimitError)
    same(error.body, wanted, "the error object")


CHECKS = [
    ("chat", invoke),
    ("chat stream", stream),
    ("async stream", async_stream),
    ("chain, batch of 3", chain),
    ("completion, stream, 4 prompts", completion),
    ("stop", stop),
    ("log-probs", logprobs),
    ("seeded choices", choices),
    ("extra fields", extra_fields),
    ("400", error_400),
    ("400 context", error_context),
    ("401", error_401),
    ("404", error_404),
    ("429", error_429),
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
