"""What a client has sent, sent again as plain HTTP and not streamed: text and counts that it should have got."""

from dataclasses import dataclass

from checking import Json, Server, same, without

STREAM_FIELDS = ("stream", "stream_options")


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int
    output_tokens: int


def asked_again(server: Server, path: str, body: Json) -> Answer:
    """body: greedy. path: of completions, chats, responses or messages."""
    status, answer = server.post(path, without(body, *STREAM_FIELDS))
    same(status, 200, f"status of {path}, which says {answer}")
    usage = answer["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    prompt += usage.get("cache_read_input_tokens", 0)  # Anthropic's input_tokens are the others
    output = usage.get("completion_tokens", usage.get("output_tokens"))
    return Answer(_text(path, answer), prompt, output)


def _text(path: str, answer: Json) -> str:
    text: str
    match path:
        case "/v1/completions":
            text = answer["choices"][0]["text"]
        case "/v1/chat/completions":
            text = answer["choices"][0]["message"]["content"]
        case "/v1/responses":
            text = answer["output"][0]["content"][0]["text"]
        case _:
            text = answer["content"][0]["text"]
    return text
