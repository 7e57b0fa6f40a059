"""Reasoning apart from content in answers of models that reason, whole and streamed, and beside tool calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from router_service.model_parsers import ParserNames
from tests.helpers.chat_templates import DEEPSEEK_R1, QWEN3
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    MODEL,
    chat_body,
    completion_body,
    events,
    model_with_template,
    running_server,
    tokens,
)

EOS = 2
THOUGHT = "<think>\nTwo and two.\n</think>\n\n"
USER = {"role": "user", "content": "2 + 2?"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@contextmanager
def saying(text: str, model_dir: Path, **options: Any) -> Iterator[httpx.Client]:
    with (
        ScriptedEngine(token_ids=[*tokens(text), EOS]) as engine,
        running_server(engine, model_dir=model_dir, **options) as (client, _),
    ):
        yield client


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return model_with_template(tmp_path, QWEN3)


def message(client: httpx.Client, *, stream: bool, **fields: Any) -> tuple[Any, Any, str]:
    """reasoning, content and finish_reason."""
    response = client.post(CHAT, json=chat_body(messages=[USER], stream=stream, **fields))
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = response.json()["choices"]
        said = choice["message"]
        assert said["reasoning"] == said["reasoning_content"]
        return said["reasoning_content"], said["content"], choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in events(response)]
    deltas = [choice["delta"] for choice in choices]
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    joined = [
        "".join(d.get(name) or "" for d in deltas) or None for name in ("reasoning", "content")
    ]
    return joined[0], joined[1], choices[-1]["finish_reason"]


STREAM = pytest.mark.parametrize("stream", [False, True])


@STREAM
def test_reasoning_that_the_model_opens_is_told_apart(stream: bool, qwen: Path) -> None:
    with saying(THOUGHT + "Four.", qwen) as client:
        assert message(client, stream=stream) == ("Two and two.", "Four.", "stop")


@STREAM
def test_without_reasoning_all_is_content(stream: bool, qwen: Path) -> None:
    with saying("Four.", qwen) as client:
        assert message(client, stream=stream) == (None, "Four.", "stop")


@STREAM
def test_after_a_prompt_that_closes_the_reasoning_all_is_content(stream: bool, qwen: Path) -> None:
    with saying("Four. </think>", qwen) as client:
        variables = {"enable_thinking": False}
        told = message(client, stream=stream, chat_template_kwargs=variables)
    assert told == (None, "Four. </think>", "stop")


@STREAM
def test_reasoning_that_the_prompt_has_opened_is_told_apart(stream: bool, tmp_path: Path) -> None:
    with saying("Two.\n</think>\n\nFour.", model_with_template(tmp_path, DEEPSEEK_R1)) as client:
        assert message(client, stream=stream) == ("Two.", "Four.", "stop")
        thinking = {"thinking": False}
        told = message(client, stream=stream, chat_template_kwargs=thinking, stop=["</think>"])
    assert told == (None, "Two.\n", "stop")


@STREAM
def test_an_answer_that_ends_within_its_reasoning_has_no_content(stream: bool, qwen: Path) -> None:
    with saying(THOUGHT + "Four.", qwen) as client:
        length = len(tokens("<think>\nTwo and"))
        told = message(client, stream=stream, max_tokens=length)
    assert told == ("Two and", None, "length")


@STREAM
def test_a_stop_string_within_the_reasoning_ends_the_answer(stream: bool, qwen: Path) -> None:
    with saying(THOUGHT + "Four.", qwen) as client:
        assert message(client, stream=stream, stop="and t") == ("Two ", None, "stop")


@pytest.mark.parametrize(("parser", "told"), [("deepseek_r1", "Two."), ("none", None)])
def test_the_parser_can_be_chosen(parser: Any, told: str | None, qwen: Path) -> None:
    names = ParserNames(reasoning=parser)
    with saying("Two.</think>Four.", qwen, parser_names=names) as client:
        body = client.post(CHAT, json=chat_body(messages=[USER])).json()
    assert body["choices"][0]["message"].get("reasoning") == told


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_tokens_are_counted_with_their_markers(stream: bool, qwen: Path) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with saying(THOUGHT + "Four.", qwen) as client:
        response = client.post(CHAT, json=chat_body(messages=[USER], **options))
    usage = (events(response)[-1] if stream else response.json())["usage"]
    expected = len(tokens("<think>\nTwo and two.\n</think>"))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert usage["completion_tokens"] == len(tokens(THOUGHT + "Four.")) + 1


@STREAM
def test_calls_are_read_behind_the_reasoning_and_not_within_it(stream: bool, qwen: Path) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    with saying(f"<think>\n{call} or so\n</think>\n\n{call}", qwen) as client:
        body = chat_body(messages=[USER], tools=TOOLS)
        told = message(client, stream=stream, tools=TOOLS)
        (made,) = client.post(CHAT, json=body).json()["choices"][0]["message"]["tool_calls"]
    assert told == (call + " or so", None, "tool_calls")
    assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_an_answer_with_reasoning_is_accepted_back_and_makes_the_same_prompt(qwen: Path) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    with saying(THOUGHT + call, qwen) as client:
        body = chat_body(messages=[USER], tools=TOOLS, return_token_ids=True)
        first = client.post(CHAT, json=body).json()
        said = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "4"}
        second = client.post(CHAT, json={**body, "messages": [USER, said, result]}).json()
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before


def test_an_answer_is_accepted_back_where_the_template_leaves_its_reasoning_out(
    tmp_path: Path,
) -> None:
    with saying("Two.</think>Four.", model_with_template(tmp_path, DEEPSEEK_R1)) as client:
        said = client.post(CHAT, json=chat_body(messages=[USER])).json()["choices"][0]["message"]
        assert said["reasoning_content"] == "Two."
        response = client.post(CHAT, json=chat_body(messages=[USER, said, USER]))
    assert response.status_code == 200


def test_a_continued_reasoning_goes_on_as_reasoning(qwen: Path) -> None:
    begun = {"role": "assistant", "content": "<think>\nTwo"}
    with saying(" and two.</think>Four.", qwen) as client:
        body = chat_body(messages=[USER, begun], continue_final_message=True)
        said = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert (said["reasoning"], said["content"]) == (" and two.", "Four.")


def test_completions_are_not_read(qwen: Path) -> None:
    with saying(THOUGHT + "Four.", qwen) as client:
        answer = client.post(COMPLETIONS, json=completion_body(max_tokens=20)).json()
    assert "Two and two." in answer["choices"][0]["text"]
    assert "completion_tokens_details" not in answer["usage"]


def test_the_sdk_reads_reasoning_of_a_stream(qwen: Path) -> None:
    with saying(THOUGHT + "Four.", qwen) as client:
        base_url = f"{client.base_url}/v1".replace("//v1", "/v1")
        with (
            OpenAI(base_url=base_url, api_key="none", max_retries=0) as openai,
            openai.chat.completions.stream(model=MODEL, messages=[USER]) as stream,
        ):
            list(stream)
            said = stream.get_final_completion().choices[0].message
    assert said.content == "Four."
    assert said.to_dict()["reasoning_content"] == "Two and two."
