"""What an answer says, whole or streamed, of completions and of chats: equal when all choices and the usage are."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Choice:
    """logprobs: of all tokens, by the names of the API's lists"""

    text: str
    finish_reason: str
    logprobs: dict[str, list[Any]]


@dataclass(frozen=True)
class Told:
    choices: list[Choice]
    usage: dict[str, Any]


def told_whole(client: httpx.Client, path: str, body: dict[str, Any]) -> Told:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    return Told([_joined([choice]) for choice in whole["choices"]], whole["usage"])


def told_streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> Told:
    """Raises KeyError when the stream says an error."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body) as stream:
        lines = list(stream.iter_lines())
    events = [json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: {")]
    pieces = [choice for event in events for choice in event["choices"]]
    numbers = sorted({piece["index"] for piece in pieces})
    choices = [_joined([p for p in pieces if p["index"] == number]) for number in numbers]
    return Told(choices, events[-1]["usage"])


def _joined(pieces: list[Any]) -> Choice:
    logprobs: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in (piece.get("logprobs") or {}).items():
            logprobs.setdefault(name, []).extend(values or [])
    (reason,) = [p["finish_reason"] for p in pieces if p["finish_reason"] is not None]
    return Choice("".join(map(_text, pieces)), reason, logprobs)


def _text(piece: Any) -> str:
    """Of a completion, of a chat's piece, or of a whole chat."""
    if "text" in piece:
        return str(piece["text"])
    return (piece.get("delta") or piece.get("message") or {}).get("content") or ""
