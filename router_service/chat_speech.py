"""What an answer says as a chat message and as deltas of one, in OpenAI's shapes. Pure.

Reasoning has the two names that clients look for: `reasoning_content` (DeepSeek's) and `reasoning` (vLLM's).
"""

from typing import Any

from router_service.answer_reading import AnswerReading
from router_service.said import Said, ToolCall

Json = dict[str, Any]


def whole_message(said: Said, reading: AnswerReading) -> Json:
    """Content that may have given way to something else is null where there is none."""
    content = said.text if said.text or reading.is_plain else None
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if reading.reasoning is not None:
        message |= _reasoning(said.reasoning or None)
    if said.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in said.calls
        ]
    return message


def opening_delta(reading: AnswerReading) -> Json:
    return {"role": "assistant", "content": "" if reading.is_plain else None}


def message_deltas(said: Said, num_calls_before: int) -> list[Json]:
    """One thing each. A call is its index, id and name first, then its arguments."""
    deltas: list[Json] = []
    if said.reasoning:
        deltas.append(_reasoning(said.reasoning))
    if said.text:
        deltas.append({"content": said.text})
    for index, call in enumerate(said.calls, num_calls_before):
        deltas += _call_deltas(index, call)
    return deltas


def _call_deltas(index: int, call: ToolCall) -> list[Json]:
    begun = {"name": call.name, "arguments": ""}
    return [
        {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": begun}]},
        {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
    ]


def _reasoning(text: str | None) -> Json:
    return {"reasoning_content": text, "reasoning": text}
