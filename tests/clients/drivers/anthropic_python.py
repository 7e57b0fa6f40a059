"""The anthropic SDK for Python on /v1/messages: its objects hold what plain HTTP says, its exceptions the errors."""

import asyncio
import json
import sys
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from checking import ANSWER_SECONDS, Json, LeftOut, Server, raised, run_checks, same, some, without
from questions import CALLING, CHAT, CHAT_PATH, TOO_MANY_TOKENS, TOOL, stop_within

PATH = "/v1/messages"
FURTHER = ("temperature", "top_k")
SYSTEM, USER = (message["content"] for message in CHAT["messages"])
MESSAGE: Json = {
    "system": SYSTEM,
    "messages": [{"role": "user", "content": USER}],
    "temperature": 0.0,
    "max_tokens": 40,
}
TOOLS = [
    {
        "name": TOOL["name"],
        "description": TOOL["description"],
        "input_schema": TOOL["parameters"],
    }
]
TOOL_MESSAGE: Json = {
    "messages": [{"role": "user", "content": CALLING}],
    "tools": TOOLS,
    "temperature": 0.0,
    "max_tokens": 60,
}


def client_of(server: Server, **options: Any) -> Anthropic:
    """Without a timeout of its own it refuses to ask for many tokens at all."""
    fields = {
        "base_url": server.url,
        "api_key": server.api_key,
        "max_retries": 0,
        "timeout": ANSWER_SECONDS,
    }
    return Anthropic(**(fields | options))


def sent(fields: Json) -> Json:
    """What the SDK's create has no argument for goes as a further field."""
    further = {name: fields[name] for name in FURTHER if name in fields}
    return {**without(fields, *FURTHER), "extra_body": further}


def same_body(message: Any, wanted: Json) -> None:
    got = message.model_dump(exclude_unset=True)
    same(without(got, "id"), without(wanted, "id"), "the body")
    same(type(message.id), str, "the type of its id")


def messages(server: Server) -> None:
    """The same chat as OpenAI's says the same."""
    wanted = server.settled(PATH, **MESSAGE)
    message = client_of(server).messages.create(model=server.model, **sent(MESSAGE))
    some(message.usage.cache_read_input_tokens, "cache_read_input_tokens")
    same_body(message, wanted)
    chat = server.settled(CHAT_PATH, **CHAT)
    same(message.content[0].text, chat["choices"][0]["message"]["content"], "the chat's text")
    usage = message.usage
    whole = usage.input_tokens + usage.cache_read_input_tokens
    same(whole, chat["usage"]["prompt_tokens"], "the chat's prompt tokens")


def stream(server: Server) -> None:
    wanted = server.settled(PATH, **MESSAGE)
    events = list(
        client_of(server).messages.create(model=server.model, **sent(MESSAGE), stream=True)
    )
    kinds = [event.type for event in events]
    same(kinds[:2], ["message_start", "content_block_start"], "how it begins")
    same(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"], "how it ends")
    joined = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    same(joined, wanted["content"][0]["text"], "the joined text")


def stream_helper(server: Server) -> None:
    """The SDK joins the events itself."""
    wanted = server.settled(PATH, **MESSAGE)
    with client_of(server).messages.stream(model=server.model, **sent(MESSAGE)) as told:
        joined = "".join(told.text_stream)
        final = told.get_final_message()
    same(joined, wanted["content"][0]["text"], "the joined text")
    same(final.content[0].text, joined, "the text of the message")
    same(final.stop_reason, wanted["stop_reason"], "what ended it")
    for name in ("input_tokens", "output_tokens", "cache_read_input_tokens"):
        same(getattr(final.usage, name), wanted["usage"][name], name)


def async_stream(server: Server) -> None:
    wanted = server.settled(PATH, **MESSAGE)

    async def text() -> str:
        async with (
            AsyncAnthropic(base_url=server.url, api_key=server.api_key, max_retries=0) as client,
            client.messages.stream(model=server.model, **sent(MESSAGE)) as told,
        ):
            return "".join([piece async for piece in told.text_stream])

    same(asyncio.run(text()), wanted["content"][0]["text"], "the joined text")


def stop(server: Server) -> None:
    whole = server.settled(PATH, **MESSAGE)["content"][0]["text"]
    sequence = stop_within(whole)
    message = client_of(server).messages.create(
        model=server.model, **sent(MESSAGE), stop_sequences=[sequence]
    )
    same(message.content[0].text, whole.partition(sequence)[0], "the text before it")
    told = (message.stop_reason, message.stop_sequence)
    same(told, ("stop_sequence", sequence), "what ended it")


def tools(server: Server) -> None:
    """A call is a block, whole and streamed; it goes back as it came, with the tool's result."""
    client = client_of(server)
    wanted = server.settled(PATH, **TOOL_MESSAGE)
    message = client.messages.create(model=server.model, **sent(TOOL_MESSAGE))
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        raise LeftOut("this model does not call the tool")
    (call,) = calls
    same((call.name, call.input), (TOOL["name"], {"city": "Paris"}), "the call")
    same(message.stop_reason, "tool_use", "what ended it")
    same([call.input], [b["input"] for b in wanted["content"]], "the input that plain HTTP says")
    with client.messages.stream(model=server.model, **sent(TOOL_MESSAGE)) as told:
        final = told.get_final_message()
    streamed = [(block.type, block.name, block.input) for block in final.content]
    same(streamed, [("tool_use", call.name, call.input)], "the streamed call")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 degrees."}
    turns = [
        *TOOL_MESSAGE["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(model=server.model, **sent({**TOOL_MESSAGE, "messages": turns}))
    same([block.type for block in again.content], ["text"], "what the result is answered with")
    some(again.content[0].text, "the text")


def count_tokens(server: Server) -> None:
    """As many as a message with it has."""
    asked = without(MESSAGE, "temperature", "max_tokens")
    counted = client_of(server).messages.count_tokens(model=server.model, **asked)
    usage = server.settled(PATH, **MESSAGE)["usage"]
    whole = usage["input_tokens"] + usage["cache_read_input_tokens"]
    same(counted.input_tokens, whole, "input_tokens")


def error_of(server: Server, wanted: int, *, api_key: str | None = None, **fields: Any) -> Json:
    """The body of plain HTTP's answer. Raises LeftOut where the server has no reason to refuse."""
    status, answer = server.post(PATH, {"model": server.model, **fields}, api_key=api_key)
    if status == 200:
        raise LeftOut(f"no {wanted} from this server")
    same(status, wanted, f"status of {PATH}, which says {answer}")
    return answer


def error_400(server: Server) -> None:
    client = client_of(server)
    for wrong in ({"top_k": -5}, {"max_tokens": TOO_MANY_TOKENS}):
        asked = {**MESSAGE, **wrong}
        wanted = error_of(server, 400, **asked)
        for streamed in (False, True):
            error = raised(
                lambda asked=asked, streamed=streamed: client.messages.create(
                    model=server.model, **sent(asked), stream=streamed
                ),
                anthropic.BadRequestError,
            )
            same(error.body, wanted, "the body")
        same(wanted["error"]["type"], "invalid_request_error", "the type")


def error_401(server: Server) -> None:
    wanted = error_of(server, 401, api_key="not a key", **MESSAGE)
    client = client_of(server, api_key="not a key")
    error = raised(
        lambda: client.messages.create(model=server.model, **sent(MESSAGE)),
        anthropic.AuthenticationError,
    )
    same(error.body, wanted, "the body")
    same(json.loads(error.response.text), wanted, "what was sent")


def error_404(server: Server) -> None:
    wanted = error_of(server, 404, **{**MESSAGE, "model": "no-such-model"})
    error = raised(
        lambda: client_of(server).messages.create(model="no-such-model", **sent(MESSAGE)),
        anthropic.NotFoundError,
    )
    same(error.body, wanted, "the body")


CHECKS = [
    ("messages", messages),
    ("stream", stream),
    ("stream helper", stream_helper),
    ("async stream", async_stream),
    ("stop", stop),
    ("tools", tools),
    ("count_tokens", count_tokens),
    ("400", error_400),
    ("401", error_401),
    ("404", error_404),
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
