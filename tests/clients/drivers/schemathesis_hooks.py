"""Loaded by schemathesis: answers of a real model are kept short, so that a minute holds many requests."""

from typing import Any

import schemathesis

MOST_TOKENS = 8
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
UNLIMITED = {"messages": "max_completion_tokens", "input": "max_output_tokens"}
"""By a field of the body, the limit that may be absent or null; of Anthropic's messages it may not."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """A limit that is wrong stays as it is."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in LIMITS:
        if type(body.get(name)) is int and body[name] > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if "/messages" in case.path or any(body.get(name) is not None for name in LIMITS):
        return
    for field, limit in UNLIMITED.items():
        if field in body:
            body[limit] = MOST_TOKENS
