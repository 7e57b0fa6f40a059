"""What an answer says as a chat message and as deltas of one, in OpenAI's shapes. Pure.

Reasoning has the two names that clients look for: `reasoning_content` (DeepSeek's) and `reasoning` (vLLM's).
"""

from collections.abc import Sequence
from typing import Any

from router_service.answer_reading import AnswerReading
from router_service.said import CallPart, Said

Json = dict[str, Any]


def whole_message(said: Said, reading: AnswerReading) -> Json:
    """Content that may have given way to something else is null where there is none."""
    content = said.text if said.text or reading.is_plain else None
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if reading.reasoning is not None:
        message |= _reasoning(said.reasoning or None)
    if calls := said.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def opening_delta(reading: AnswerReading) -> Json:
    return {"role": "assistant", "content": "" if reading.is_plain else None}


def message_deltas(said: Said, num_calls_before: int) -> list[Json]:
    """One thing each. A call is its index, id and name first, then its arguments as they come."""
    deltas = _call_deltas(said.going_on, num_calls_before)
    if said.reasoning:
        deltas.append(_reasoning(said.reasoning))
    if said.text:
        deltas.append({"content": said.text})
    return deltas + _call_deltas(said.begun, num_calls_before)


def _call_deltas(parts: Sequence[CallPart], num_calls_before: int) -> list[Json]:
    told: list[Json] = []
    num_calls = num_calls_before
    for part in parts:
        if (head := part.head) is not None:
            num_calls += 1
            begun = {"name": head.name, "arguments": ""}
            call = {"index": num_calls - 1, "id": head.id, "type": "function", "function": begun}
            told.append(call)
        if part.arguments:
            told.append({"index": num_calls - 1, "function": {"arguments": part.arguments}})
    return [{"tool_calls": [call]} for call in told]


def _reasoning(text: str | None) -> Json:
    return {"reasoning_content": text, "reasoning": text}
