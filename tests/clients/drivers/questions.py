"""What every client asks, as bodies without the model. Greedy, so that there is one right answer."""

from typing import Any

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are Minnow, a small helpful model."},
        {"role": "user", "content": "What is expert parallelism?"},
    ],
    "temperature": 0.0,
    "max_tokens": 40,
}
COMPLETION: dict[str, Any] = {
    "prompt": "In the beginning God created the heaven and the earth.",
    "temperature": 0.0,
    "max_tokens": 40,
}
PROMPTS = ["Once upon a time", "To be, or not to be", "The planets are"]
DRAWN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story about a dragon."}],
    "temperature": 1.0,
    "seed": 7,
    "n": 3,
    "max_tokens": 24,
}
"""Three choices that a seed decides."""
TOO_MANY_TOKENS = 10**9
"""More than the context of any model."""
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


def stop_within(text: str) -> str:
    """Six characters of a text, about its middle: more than one token, beginning anywhere."""
    middle = len(text) // 2
    return text[middle : middle + 6]


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": WEATHER,
    "strict": True,
}
CALLING = "What is the weather in Paris?"
NOT_CALLING = "Who are you?"
TOOL_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": CALLING}],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "temperature": 0.0,
    "max_tokens": 60,
}
"""Which the demo model answers with a call."""
CAPITAL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "enum": ["Oslo", "Paris", "Rome"]},
        "coastal": {"type": "boolean"},
    },
    "required": ["capital", "coastal"],
    "additionalProperties": False,
}
CAPITAL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of Norway?"}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "capital", "schema": CAPITAL_SCHEMA, "strict": True},
    },
    "temperature": 0.0,
    "max_tokens": 300,
}
"""Room enough for the blanks that may stand between two tokens of JSON."""
REASONING: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Repeat after me: The brave owl sat on the drum."},
        {"role": "assistant", "content": "<think>The brave"},
    ],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "temperature": 0.0,
    "max_tokens": 20,
}
"""The answer goes on with reasoning that the prompt has begun."""
RESPONSE: dict[str, Any] = {
    "instructions": CHAT["messages"][0]["content"],
    "input": CHAT["messages"][1]["content"],
    "temperature": 0.0,
    "max_output_tokens": 40,
}
RESPONSES_PATH = "/v1/responses"
EXTRAS: dict[str, Any] = {
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "return_routed_experts": "weights",
}
