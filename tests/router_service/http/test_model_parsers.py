"""Parsers of a model: as named, or found by what its chat template shows."""

from typing import Any

import pytest

from router_service.model_parsers import BY_TEMPLATE, ParserNames, choose_parsers
from router_service.tool_calls.deepseek import DEEPSEEK
from tests.helpers.chat_templates import (
    DEEPSEEK_R1,
    MISTRAL,
    MISTRAL_ARGS,
    NAMED,
    QWEN3,
    make_template,
)

QWEN_CODER = QWEN3.replace(
    """'<tool_call>\\n{"name": "' + call.function.name + '", "arguments": '""",
    "'<tool_call>\\n<function=' + call.function.name + '>'",
)


@pytest.mark.parametrize(
    ("source", "calls", "reasoning"),
    [
        (QWEN3, "hermes", "qwen3"),
        (DEEPSEEK_R1, "deepseek", "qwen3"),
        (MISTRAL, "mistral", None),
        (MISTRAL_ARGS, "mistral", None),
        (NAMED, "none", None),
        (QWEN_CODER, "none", "qwen3"),
    ],
    ids=["qwen3", "deepseek", "mistral", "mistral args", "named", "qwen coder"],
)
def test_parsers_are_found_by_the_template(source: str, calls: str, reasoning: str | None) -> None:
    parsers = choose_parsers(BY_TEMPLATE, make_template(source))
    assert (parsers.call_format_name, parsers.reasoning) == (calls, reasoning)


def test_a_model_without_a_template_has_none() -> None:
    parsers = choose_parsers(BY_TEMPLATE, None)
    assert (parsers.call_format, parsers.reasoning) == (None, None)


@pytest.mark.parametrize("reasoning", ["deepseek_r1", "qwen3"])
def test_named_parsers_go_before_the_template(reasoning: Any) -> None:
    parsers = choose_parsers(ParserNames("deepseek", reasoning), make_template(QWEN3))
    assert (parsers.call_format, parsers.reasoning) == (DEEPSEEK, reasoning)


def test_parsers_can_be_switched_off() -> None:
    parsers = choose_parsers(ParserNames("none", "none"), make_template(QWEN3))
    assert (parsers.call_format, parsers.reasoning) == (None, None)
