"""Bodies that are nearly right: seeded mutations of valid ones, as JSON values and as bytes."""

import copy
import json
import random
from typing import Any

from tests.router_service.http.helpers import MODEL

Json = Any
_IDS = [5, 6, 7, 8, 9, 10]
_USER = [{"role": "user", "content": "hello"}]
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}
_NAMED = {"type": "function", "function": {"name": "f"}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
_RULES = {"logit_bias": {"7": 5}, "presence_penalty": 0.5, "repetition_penalty": 1.1}
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": MODEL, "prompt": _IDS, "max_tokens": 3, "stop": ["x"], "seed": 1},
        {"model": MODEL, "prompt": [_IDS, [1]], "max_tokens": 2, "n": 2, "logprobs": 1},
        {"model": MODEL, "prompt": _IDS, "stream": True, "stream_options": {"include_usage": True}},
        {"model": MODEL, "prompt": _IDS, "max_tokens": 0, "echo": True, "logprobs": 2},
        {"model": MODEL, "prompt": _IDS, "return_routed_experts": True, "routed_experts_end": 3},
        {"model": MODEL, "prompt": _IDS, "max_tokens": 2, "prompt_logprobs": 2, **_RULES},
        {"model": MODEL, "prompt": _IDS, "max_tokens": 2, "guided_regex": "[ab]{1,3}"},
        {
            "model": MODEL,
            "prompt": _IDS,
            "max_tokens": 2,
            "structured_outputs": {"choice": ["a", "b"]},
        },
    ],
    "/v1/chat/completions": [
        {"model": MODEL, "messages": _USER, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9},
        {
            "model": MODEL,
            "messages": _USER,
            "max_tokens": 2,
            "tools": [_TOOL],
            "tool_choice": "auto",
        },
        {
            "model": MODEL,
            "messages": _USER,
            "max_tokens": 2,
            "tools": [_TOOL],
            "tool_choice": _NAMED,
        },
        {"model": MODEL, "messages": _USER, "max_tokens": 2, "response_format": _FORMAT, **_RULES},
        {
            "model": MODEL,
            "messages": [*_USER, {"role": "assistant", "content": "hi"}],
            "max_tokens": 2,
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {
            "model": MODEL,
            "messages": [
                *_USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": [1]}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            "max_tokens": 2,
        },
    ],
    "/v1/responses": [
        {"model": MODEL, "input": "hello", "max_output_tokens": 2, "store": False},
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
            "text": {"format": {"type": "text"}},
            "stream": True,
        },
    ],
    "/v1/messages": [
        {"model": MODEL, "messages": _USER, "max_tokens": 2, "stop_sequences": ["x"]},
        {
            "model": MODEL,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                *_USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}],
                },
            ],
            "max_tokens": 2,
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [{"model": MODEL, "messages": _USER}],
    "/tokenize": [
        {"prompt": "hello", "return_token_strs": True},
        {"messages": _USER, "add_generation_prompt": False},
    ],
    "/detokenize": [{"tokens": _IDS}],
    "/v1/embeddings": [{"model": MODEL, "input": "x"}],
}
_STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.0, 0.5, -0.0, 1e308, 1e-320),
    *(2**31, 2**63, -(2**63) - 1, 10**40, "", " ", "0", "auto", "none", "required"),
    *("\0", "\ud83d", "\ufffd", "a\nb", "🙂", "x" * 5_000, "<|im_end|>", "messages[0]"),
    *([], {}, [[]], [None], [{}], {"": None}, {"type": "text"}, {"type": "function"}),
    *([_IDS], [97], [-1], [1] * 200, {"role": "user"}, {"a": {"b": {"c": [1, {"d": []}]}}}),
]


def mutated_body(path: str, source: random.Random) -> bytes:
    """A valid body of `path` after up to two changes, in one of four cases also of its bytes."""
    body = copy.deepcopy(source.choice(VALID[path]))
    for _ in range(source.randint(0, 2)):
        _change(body, source)
    encoded = json.dumps(body).encode()
    return _with_wrong_bytes(encoded, source) if source.random() < 0.25 else encoded


def _change(body: dict[str, Any], source: random.Random) -> None:
    """One place of the body, however deep, gets another value, goes, or is there twice."""
    holder: Json = body
    while True:
        key = source.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or source.random() < 0.3:
            break
        holder = inner
    match source.randrange(5):
        case 0 if len(holder) > 1:
            del holder[key]
        case 1:
            holder[key] = [inner]
        case 2 if isinstance(holder, dict):
            holder[source.choice(["unknown", "type", "name", "n", "stream", "content"])] = (
                copy.deepcopy(inner)
            )
        case 3 if isinstance(holder, list):
            holder.append(copy.deepcopy(inner))
        case _:
            holder[key] = copy.deepcopy(source.choice(_STRANGE))


def _with_wrong_bytes(encoded: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(encoded))
    match source.randrange(4):
        case 0:
            return encoded[:place]
        case 1:
            return encoded[:place] + source.randbytes(source.randint(1, 8)) + encoded[place:]
        case 2:
            return encoded[:place] + source.randbytes(1) + encoded[place + 1 :]
        case _:
            return source.randbytes(source.randint(0, 64))
