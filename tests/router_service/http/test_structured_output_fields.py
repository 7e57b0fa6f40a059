"""Structured output at the HTTP server: what reaches the engine, what is refused, what a bad grammar does not harm."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.errors import GrammarError
from cluster.grammar import GrammarCompiler, GrammarKind, grammar_text, load_grammar_compiler
from router_service.grammar_checks import MAX_WAITING_OF_A_TENANT
from router_service.grammar_fields import MAX_GRAMMAR_CHARACTERS
from tests.helpers.chat_templates import DEEPSEEK_R1
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    DEMO_MODEL,
    MODEL,
    VOCAB_SIZE,
    assert_serves,
    chat_body,
    completion_body,
    events,
    model_with_template,
    running_server,
    tokens,
)

ENDPOINTS = [(COMPLETIONS, completion_body), (CHAT, chat_body)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WIDE = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(600)}}
WIDE["required"] = list(WIDE["properties"])
LARGEST_NUMBERS = {
    "properties": {"maximum": {"type": "integer", "maximum": 2**53, "default": 10**30}},
    "minItems": 2**31 - 1,
}
BOMB = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(30)]}
"""An intersection of automata that would take hours to compile."""


def as_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, ScriptedEngine]]:
    """One server for all, so that its process for grammars starts once."""
    with ScriptedEngine() as engine, running_server(engine) as (client, _):
        yield client, engine


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS, ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        ({"response_format": as_format(SCHEMA)}, "json", SCHEMA),
        ({"response_format": as_format(SCHEMA, strict=True, description="d")}, "json", SCHEMA),
        ({"response_format": as_format(SCHEMA, strict=False)}, "json", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+b"}}, "regex", "a+b"),
        ({"structured_outputs": {"choice": ["x", "é"]}}, "choice", ["x", "é"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA),
        ({"guided_regex": "a+b"}, "regex", "a+b"),
        ({"guided_choice": ["x", "y"]}, "choice", ["x", "y"]),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"guided_json": {}}, "json", {}),
        ({"guided_json": WIDE}, "json", WIDE),
        ({"guided_json": LARGEST_NUMBERS}, "json", LARGEST_NUMBERS),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_grammar_reaches_the_engine(
    fields: dict[str, Any],
    kind: GrammarKind,
    source: Any,
    path: str,
    make_body: Any,
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, engine = served
    response = client.post(path, json=make_body(max_tokens=2, **fields))
    assert response.status_code == 200, response.text
    text = (
        source
        if isinstance(source, str)
        else json.dumps(source, ensure_ascii=False, separators=(",", ":"))
    )
    assert engine.submits[-1].sampling.rules.grammar == grammar_text(kind, text)


def test_the_format_of_a_response_reaches_the_engine(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, engine = served
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    response = client.post("/v1/responses", json={"model": MODEL, "input": "hello", "text": text})
    assert response.status_code == 200, response.text
    expected = grammar_text("json", json.dumps(SCHEMA, separators=(",", ":")))
    assert engine.submits[-1].sampling.rules.grammar == expected


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
def test_without_one_no_grammar_reaches_the_engine(
    fields: dict[str, Any], served: tuple[httpx.Client, ScriptedEngine]
) -> None:
    client, engine = served
    assert client.post(CHAT, json=chat_body(max_tokens=2, **fields)).status_code == 200
    assert engine.submits[-1].sampling.rules.grammar is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS, ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"response_format": "json"}, "response_format", ["object"]),
        ({"response_format": {"type": "xml"}}, "response_format.type", ["json_schema"]),
        ({"response_format": {}}, "response_format.type", ["required"]),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["required"]),
        (
            {
                "response_format": {
                    "type": "json_object",
                    "json_schema": {"name": "n", "schema": {}},
                }
            },
            "response_format.json_schema",
            ["json_object"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            ["required"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            ["required"],
        ),
        ({"response_format": as_format([])}, "response_format.json_schema.schema", ["object"]),
        (
            {"response_format": as_format({"type": "notatype"})},
            "response_format.json_schema.schema",
            ["notatype"],
        ),
        (
            {"response_format": as_format({"$ref": "#"})},
            "response_format.json_schema.schema",
            ["nothing can follow"],
        ),
        (
            {"response_format": as_format({"pattern": "([", "type": "string"})},
            "response_format.json_schema.schema",
            ["regex"],
        ),
        ({"structured_outputs": {}}, "structured_outputs", ["exactly one", "0"]),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            ["exactly one", "2"],
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", []),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", []),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", ["schema"]),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", ["JSON"]),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", ["object"]),
        ({"structured_outputs": {"json": '{"a": NaN}'}}, "structured_outputs.json", ["a: NaN"]),
        (
            {"structured_outputs": {"json": f'{{"maximum": {"1" * 5000}}}'}},
            "structured_outputs.json",
            ["maximum", "5000 digits"],
        ),
        (
            {"response_format": as_format({"items": [{"minimum": -(10**30)}]})},
            "response_format.json_schema.schema.items[0].minimum",
            [str(2**53)],
        ),
        ({"guided_json": {"multipleOf": 2**53 + 1}}, "guided_json.multipleOf", [str(2**53)]),
        ({"guided_json": {"enum": [1, {"a": 10**20}]}}, "guided_json.enum[1].a", [str(2**53)]),
        ({"guided_json": {"maxLength": 2**31}}, "guided_json.maxLength", ["2147483647"]),
        (
            {"guided_json": '{"properties": {"minimum": {"maximum": 1e400}}}'},
            "guided_json.properties.minimum.maximum",
            ["inf"],
        ),
        ({"guided_json": '{"const": -1e400}'}, "guided_json.const", ["float64"]),
        ({"guided_json": {f"p{n}": {} for n in range(4097)}}, "guided_json", ["4096", "4097"]),
        ({"structured_outputs": {"json": '{"a": "\\ud800"}'}}, "structured_outputs.json", []),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex", ["regex"]),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ["1"]),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ["1"]),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", ["string"]),
        ({"guided_choice": "ab"}, "guided_choice", ["list"]),
        ({"guided_choice": ["x"] * 1025}, "guided_choice", ["1024"]),
        ({"guided_choice": ["x" * 9000] * 9}, "guided_choice", [str(MAX_GRAMMAR_CHARACTERS)]),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_regex", ["65536"]),
        ({"guided_regex": "[^\\s\\S]"}, "guided_regex", []),
        ({"guided_grammar": "start: missing"}, "guided_grammar", ["missing"]),
        ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", ["x-guidance"]),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", ["65536"]),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", ["guided_json"]),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "guided_json",
            ["response_format"],
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", ["guided_regex"]),
        ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words", ["guided_regex"]),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids", ["guided_regex"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any],
    field: str,
    words: list[str],
    path: str,
    make_body: Any,
    stream: bool,
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    response = served[0].post(path, json=make_body(stream=stream, **fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert [word for word in words if word not in error["message"]] == []
    assert len(error["message"]) < 500


def test_a_grammar_that_takes_too_long_is_refused_and_nobody_else_waits_for_long(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, _ = served
    with ThreadPoolExecutor() as threads:
        bombs = [
            threads.submit(client.post, CHAT, json=chat_body(guided_json={**BOMB, "minLength": n}))
            for n in range(2)
        ]
        assert_serves(client)
        assert client.get("/health/live").status_code == 200
        answers = [bomb.result() for bomb in bombs]
    assert [answer.status_code for answer in answers] == [400] * 2
    assert "takes over 0.5 s to compile" in answers[0].json()["error"]["message"]
    good = client.post(CHAT, json=chat_body(max_tokens=1, guided_json=SCHEMA))
    assert good.status_code == 200


def test_clients_that_left_keep_nobody_waiting(served: tuple[httpx.Client, ScriptedEngine]) -> None:
    client, _ = served
    for number in range(MAX_WAITING_OF_A_TENANT + 2):
        body = chat_body(guided_json={**BOMB, "minLength": 100 + number})
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=body, timeout=httpx.Timeout(10, read=0.001))
    deadline = time.monotonic() + 20  # of CPU time they would take 33 s
    while client.post(CHAT, json=chat_body(max_tokens=1, guided_regex="[a-d]")).status_code != 200:
        assert time.monotonic() < deadline


def test_a_grammar_that_comes_to_its_limits_later_is_an_error_that_is_not_asked_again() -> None:
    """A 400, as if it had been known at once: clients repeat a 503."""
    body = chat_body(guided_regex="a+")
    with (
        ScriptedEngine(error_after=2, blames_request=True) as engine,
        running_server(engine) as (client, _),
    ):
        whole = client.post(CHAT, json=body)
        blocks = (
            client.post(CHAT, json={**body, "stream": True}).text.removesuffix("\n\n").split("\n\n")
        )
    assert whole.status_code == 400
    last = json.loads(blocks[-1].removeprefix("data: "))
    assert last == whole.json()
    assert last["error"]["param"] == "guided_regex"
    assert last["error"]["type"] == "invalid_request_error"


def test_tools_are_refused_beside_a_grammar_unless_none_may_be_called(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, _ = served
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = chat_body(max_tokens=1, tools=tools, response_format={"type": "json_object"})
    refused = client.post(CHAT, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
    assert "response_format" in refused.json()["error"]["message"]
    assert client.post(CHAT, json={**body, "tool_choice": "none"}).status_code == 200
    body["response_format"] = {"type": "text"}
    assert client.post(CHAT, json=body).status_code == 200


ANSWERS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": as_format(SCHEMA)}, '{"a": 1}', '{"b'),
    ({"guided_regex": "a+b"}, "aab", "c"),
    ({"guided_choice": ["x", "</think>"]}, "x", "y"),
    ({"guided_grammar": 'start: "a" b\nb: "c" b?'}, "accc", "c"),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-4]'}}, "a3", "a5"),
]
"""Fields, an answer that they allow and how one begins that they do not."""


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_template(tmp_path_factory.mktemp("model"), DEEPSEEK_R1)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return load_grammar_compiler(DEMO_MODEL, vocab_size=VOCAB_SIZE, eos_token_ids=(2, 0))


def may_be(compiler: GrammarCompiler, grammar: str, answer: str) -> bool | None:
    """Whether an answer may end so; None: it cannot even begin so."""
    try:
        allowed = compiler.start(grammar).allowed_after(np.array(tokens(answer), np.int32))
    except GrammarError:
        return None
    return bool(allowed[2])


@pytest.mark.parametrize(("fields", "good", "bad"), ANSWERS, ids=lambda value: str(value)[:30])
def test_a_grammar_begins_behind_the_reasoning_of_a_model_that_reasons(
    fields: dict[str, Any], good: str, bad: str, compiler: GrammarCompiler, reasoning: Path
) -> None:
    thought = "So {: \n</think>"
    with (
        ScriptedEngine(token_ids=[*tokens(f"{thought}\n\n{good}"), 2]) as engine,
        running_server(engine, model_dir=reasoning) as (client, _),
    ):
        whole = client.post(CHAT, json=chat_body(**fields)).json()["choices"][0]["message"]
        chunks = events(client.post(CHAT, json=chat_body(stream=True, **fields)))
        closed = {"chat_template_kwargs": {"thinking": False}}
        assert client.post(CHAT, json=chat_body(**fields, **closed)).status_code == 200
        opened, _, outside = [submit.sampling.rules.grammar or "" for submit in engine.submits]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    streamed = ["".join(d.get(name) or "" for d in deltas) for name in ("reasoning", "content")]
    assert [whole["reasoning"], whole["content"]] == streamed == ["So {: ", good]
    assert may_be(compiler, opened, thought + good) is True
    assert may_be(compiler, opened, f"<think>{thought}\n{good}") is True
    assert may_be(compiler, opened, good) is False
    assert may_be(compiler, opened, thought) is False
    assert may_be(compiler, opened, thought + bad) is None
    assert may_be(compiler, outside, good) is True
    assert may_be(compiler, outside, bad) is None


def test_a_schema_that_nests_deeply_is_refused_like_others(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    for depth in (100, 500, 900):
        schema = '{"items":' * depth + "{}" + "}" * depth
        content = json.dumps(chat_body(max_tokens=1))[:-1] + f', "guided_json": {schema}}}'
        assert served[0].post(CHAT, content=content).status_code in (200, 400)
    assert_serves(served[0])


def test_a_model_without_end_of_sequence_refuses_grammars_and_serves_the_rest() -> None:
    with ScriptedEngine() as engine, running_server(engine, eos_token_ids=()) as (client, _):
        response = client.post(CHAT, json=chat_body(max_tokens=1, guided_regex="a"))
        assert response.status_code == 400
        assert "end-of-sequence" in response.json()["error"]["message"]
        assert_serves(client)
