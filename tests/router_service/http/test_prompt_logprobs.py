"""`prompt_logprobs`: a prompt's tokens with their ranks as vLLM lists them, on both endpoints, for every prompt."""

from typing import Any

import httpx
import pytest

from router_service.logprobs import Json
from tests.helpers.scripted_engine import ScriptedEngine, scripted_rank, scripted_score
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    COMPLETIONS,
    assert_error,
    chat_body,
    completion_body,
    render,
    running_server,
    tokens,
)

PROMPT = "hello there, \U0001f680 world"
OTHER = "good morning"
IDS = tokens(" one two three")


@pytest.fixture(scope="module")
def engine() -> Any:
    with ScriptedEngine(token_ids=IDS) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Any:
    with running_server(engine) as (client, _):
        yield client


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: httpx.Client, **fields: Any) -> Any:
    return answer(
        client, COMPLETIONS, completion_body(**({"prompt": PROMPT, "max_tokens": 2} | fields))
    )


def expected(token_ids: list[int], num_asked: int) -> list[Json | None]:
    """Of a scripted prompt. At least one alternative is listed by the engine, and as many as asked are told."""
    told: list[Json | None] = [None]
    for token_id in token_ids[1:]:
        logprob, listed = scripted_score(token_id, max(1, num_asked))
        ranked = {token_id: (logprob, scripted_rank(token_id))}
        for place, (listed_id, value) in enumerate(listed[:num_asked]):
            ranked.setdefault(listed_id, (value, place + 1))
        told.append(
            {
                str(i): {"logprob": value, "rank": rank, "decoded_token": CODEC.token_text(i)}
                for i, (value, rank) in ranked.items()
            }
        )
    return told


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_completion_tells_every_prompt_token_with_its_rank_and_alternatives(
    client: httpx.Client, asked: int, as_ids: bool
) -> None:
    prompt = tokens(PROMPT) if as_ids else PROMPT
    (choice,) = complete(client, prompt=prompt, prompt_logprobs=asked)["choices"]
    assert choice["prompt_logprobs"] == expected(tokens(PROMPT), asked)
    assert choice["logprobs"] is None
    assert PROMPT not in choice["text"]


def test_every_choice_of_every_prompt_has_those_of_its_own_prompt(client: httpx.Client) -> None:
    choices = complete(client, prompt=[PROMPT, OTHER], n=3, prompt_logprobs=2)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice, prompt in zip(choices, [PROMPT] * 3 + [OTHER] * 3, strict=True):
        assert choice["prompt_logprobs"] == expected(tokens(prompt), 2)


def test_a_chat_has_them_once_at_the_top(client: httpx.Client) -> None:
    body = chat_body(max_tokens=2, n=2, prompt_logprobs=3)
    told = answer(client, CHAT, body)
    assert told["prompt_logprobs"] == expected(tokens(render(body["messages"])), 3)
    assert all("prompt_logprobs" not in choice for choice in told["choices"])


@pytest.mark.parametrize(("asked", "prompt_asked"), [(1, 4), (4, 1), (None, 4), (4, None)])
def test_echo_beside_it_shows_as_many_alternatives_as_it_asked_for(
    client: httpx.Client, asked: int | None, prompt_asked: int | None
) -> None:
    alone = complete(client, echo=True, logprobs=asked)["choices"][0]
    (both,) = complete(client, echo=True, logprobs=asked, prompt_logprobs=prompt_asked)["choices"]
    assert both["text"] == alone["text"]
    assert both["logprobs"] == alone["logprobs"]
    if prompt_asked is not None:
        assert both["prompt_logprobs"] == expected(tokens(PROMPT), prompt_asked)


def test_nothing_has_to_be_generated_for_it(client: httpx.Client) -> None:
    told = complete(client, prompt_logprobs=1, max_tokens=0)
    (choice,) = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["prompt_logprobs"] == expected(tokens(PROMPT), 1)
    assert told["usage"]["completion_tokens"] == 0


def test_the_first_token_has_none_also_where_there_is_no_other(client: httpx.Client) -> None:
    (choice,) = complete(client, prompt=[70], prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"] == [None]


def test_who_does_not_ask_gets_none_and_the_engine_is_not_asked(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    told = complete(client, prompt_logprobs=None)
    assert "prompt_logprobs" not in told["choices"][0]
    assert not engine.submits[-1].score_prompt
    complete(client, n=3, prompt_logprobs=7)
    asked = {submit.choice: submit for submit in engine.submits[-3:]}
    assert [asked[choice].score_prompt for choice in range(3)] == [True, False, False]
    assert asked[0].num_prompt_alternatives == 7


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "stream"),
        ({"prompt_logprobs": 0, "stream": True}, "stream"),
        ({"prompt_logprobs": -1}, "-1"),
        ({"prompt_logprobs": 21}, "20"),
    ],
)
def test_streams_and_counts_out_of_range_are_refused_by_name(
    client: httpx.Client, path: str, body: Any, fields: dict[str, Any], told: str
) -> None:
    response = client.post(path, json=body(**fields))
    assert_error(response, 400, "prompt_logprobs")
    assert told in response.json()["error"]["message"]


def test_max_tokens_zero_needs_something_to_answer(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json=completion_body(max_tokens=0))
    assert_error(response, 400, "max_tokens")
    assert "prompt_logprobs" in response.json()["error"]["message"]
