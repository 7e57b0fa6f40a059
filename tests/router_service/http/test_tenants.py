"""Nobody learns from the store what another tenant has sent; within a tenant everything is shared."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from router_service.api_keys import parse_api_keys
from tests.router_service.http.content_server import running_cell
from tests.router_service.http.helpers import COMPLETIONS, assert_error, completion_body

KEYS = parse_api_keys("alice a1\nalice a2\nbob b1\nn1\nn2\n", "keys")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_cell(api_keys=KEYS) as (client, _, _):
        yield client


def cached(client: httpx.Client, key: str, prompt: list[int], **fields: Any) -> int:
    body = completion_body(prompt=prompt, max_tokens=1, **fields)
    answer = client.post(COMPLETIONS, json=body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    details: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]
    assert details["replayed_tokens"] == 0
    return details["cached_tokens"]


def test_two_tenants_with_one_prompt_do_not_share_it_and_each_finds_its_own(
    client: httpx.Client,
) -> None:
    prompt = [*range(17)]
    assert [cached(client, key, prompt) for key in ("a1", "b1", "n1")] == [0, 0, 0]
    assert [cached(client, key, prompt) for key in ("a1", "b1", "n1")] == [16, 16, 16]


def test_the_keys_of_one_tenant_share_and_so_do_those_without_one(client: httpx.Client) -> None:
    prompt = [*range(20, 37)]
    assert [cached(client, key, prompt) for key in ("a1", "a2")] == [0, 16]
    assert [cached(client, key, prompt) for key in ("n1", "n2")] == [0, 16]


def test_a_salt_parts_a_tenant_s_requests_and_joins_no_two_tenants(client: httpx.Client) -> None:
    prompt = [*range(40, 57)]
    assert [cached(client, "a1", prompt, cache_salt=salt) for salt in "xyx"] == [0, 0, 16]
    assert cached(client, "b1", prompt, cache_salt="x") == 0
    assert cached(client, "a1", prompt) == 0


@pytest.mark.parametrize(
    "path",
    ["/v1/models", COMPLETIONS, "/tokenize", "/", "/nope", "/healthy", "/health/", "//health"],
)
def test_every_path_needs_a_key_but_those_of_probes(path: str, client: httpx.Client) -> None:
    assert_error(client.get(path), 401, None)
    assert_error(client.get(path, headers={"x-api-key": "a"}), 401, None)
    for open_path in ("/health", "/health/live", "/metrics", "/version"):
        assert client.get(open_path).status_code == 200


def test_all_choices_and_prompts_of_a_request_are_the_tenant_s(client: httpx.Client) -> None:
    prompts = [[*range(60, 77)], [*range(70, 87)]]
    body = completion_body(prompt=prompts, n=2, max_tokens=1)
    answer = client.post(COMPLETIONS, json=body, headers={"authorization": "Bearer b1"})
    assert len(answer.json()["choices"]) == 4
    assert [cached(client, "b1", prompt) for prompt in prompts] == [16, 16]
    assert [cached(client, "a1", prompt) for prompt in prompts] == [0, 0]
