"""The OpenAPI document: valid, whole, and kept by the server, as schemathesis finds."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from router_service.api_keys import parse_api_keys
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    MODEL,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    running_server,
    tokens,
)

DOCUMENT = "/openapi.json"
USER = [{"role": "user", "content": "hello"}]
PATHS = {
    "/v1/models",
    "/v1/models/{model}",
    COMPLETIONS,
    CHAT,
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/health",
    "/health/live",
    "/metrics",
    "/version",
}
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,negative_data_rejection,"
    "unsupported_method,allow_header_conformance,ignored_auth"
)


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get(DOCUMENT).json()
    return answer


@pytest.fixture
def short_answers() -> Iterator[ScriptedEngine]:
    ids = [*tokens(" one two three"), 2]
    with ScriptedEngine(token_ids=ids, tokens_per_step=4) as engine:
        yield engine


def run_schemathesis(url: str, directory: Path, *options: str) -> None:
    """Fails with its report."""
    arguments = [
        *("run", f"{url}{DOCUMENT}", "--seed", "1", "--checks", CHECKS, "--continue-on-failure"),
        *("--phases", "coverage,fuzzing", "--request-timeout", "20", "--no-color", *options),
    ]
    run = subprocess.run(
        [str(Path(sys.executable).parent / "schemathesis"), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    validate(document)
    assert document["openapi"] == "3.1.0"


def test_all_that_is_served_is_described(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == PATHS


def test_every_described_path_is_served(client: httpx.Client, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method in methods:
            answer = client.request(method, path.replace("{model}", MODEL))
            assert answer.status_code in (200, 400), (path, answer.text)


def test_no_field_of_an_answer_is_missing_in_its_schema(
    client: httpx.Client, document: dict[str, Any]
) -> None:
    bodies = {
        COMPLETIONS: completion_body(),
        CHAT: chat_body(),
        "/v1/responses": {"model": MODEL, "input": "x"},
        "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 1},
        "/v1/messages/count_tokens": {"model": MODEL, "messages": USER},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    schemas = document["components"]["schemas"]
    for path, body in bodies.items():
        described = document["paths"][path]["post"]["responses"]["200"]["content"]
        name = described["application/json"]["schema"]["$ref"].rpartition("/")[2]
        answer = client.post(path, json=body).json()
        assert set(answer) <= set(schemas[name]["properties"]), path


def test_neutral_fields_show_what_they_take(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["store"]["enum"] == [None, False]
    assert fields["model"]["enum"] == [MODEL]


def test_translated_bodies_show_the_fields_of_a_chat(document: dict[str, Any]) -> None:
    described = document["paths"]["/v1/responses"]["post"]["requestBody"]["content"]
    body = described["application/json"]["schema"]
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert body["properties"]["temperature"] == chat["temperature"]
    assert set(body["required"]) == {"model", "input"}


def test_errors_below_messages_are_anthropics(document: dict[str, Any]) -> None:
    def error_of(path: str) -> str:
        refused = document["paths"][path]["post"]["responses"]["400"]["content"]
        name: str = refused["application/json"]["schema"]["$ref"]
        return name.rpartition("/")[2]

    assert error_of("/v1/messages") == error_of("/v1/messages/count_tokens") == "MessagesError"
    assert error_of(CHAT) == "Error"


def test_keys_are_described_where_they_are_needed(engine: ScriptedEngine) -> None:
    keys = parse_api_keys("a-key\n", "keys")
    with running_server(engine, api_keys=keys) as (client, _):
        assert_error(client.get(DOCUMENT), 401, None)
        document = client.get(DOCUMENT, headers={"x-api-key": "a-key"}).json()
        validate(document)
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                status = client.request(method, path.replace("{model}", MODEL)).status_code
                assert ("security" in operation) == (status == 401), path
                assert ("401" in operation["responses"]) == (status == 401), path
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}


def test_the_document_names_no_key_where_none_is_needed(document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]


def test_the_server_keeps_the_document(short_answers: ScriptedEngine, tmp_path: Path) -> None:
    with running_server(short_answers) as (client, _):
        run_schemathesis(str(client.base_url), tmp_path, "--max-examples", "5")
        assert_serves(client)
        wait_until(lambda: short_answers.num_active == 0)


@pytest.mark.slow
def test_the_server_keeps_the_document_for_long(
    short_answers: ScriptedEngine, tmp_path: Path
) -> None:
    keys = parse_api_keys("a-key\n", "keys")
    with running_server(short_answers, api_keys=keys) as (client, _):
        key = ("--header", "Authorization: Bearer a-key")
        run_schemathesis(str(client.base_url), tmp_path, "--max-examples", "60", *key)
