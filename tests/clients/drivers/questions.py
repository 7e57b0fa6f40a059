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
