"""Answers move from one real engine to another over encrypted channels: body, usage, routes and scores are the same."""

import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from router_service.http_server import HttpServer
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_cell import ContentCell
from tests.helpers.scripted_engine import wait_until
from tests.router_service.http.helpers import COMPLETIONS, MODEL, make_options
from tests.router_service.http.lost_engine import LOST, CutServing, cut_serving, facts

PROMPT = list(range(1, 22))
MAX_TOKENS = 12


@dataclass(frozen=True)
class Cells:
    serving: CutServing
    first: ContentCell
    second: ContentCell
    undisturbed: httpx.Client
    """Before a third one."""

    def loses_first(self, body: dict[str, Any], num_steps: int) -> httpx.Response:
        """In the step after so many."""
        ranks = self.first.ranks
        self.serving.lead_to(self.first.service.client_endpoint)
        ranks.hold_from = len(ranks.content.steps) + num_steps
        answer = self.serving.post(COMPLETIONS, body)
        self.serving.cut_when(lambda: ranks.is_held)
        ranks.release()
        self.serving.lead_to(self.second.service.client_endpoint)
        told = answer.result(30)
        self.wait_until_idle()
        self.serving.cut()
        return told

    def wait_until_idle(self) -> None:
        for cell in (self.first, self.second):
            wait_until(lambda cell=cell: cell.client.status().num_running == 0)


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    options = {"engine_keys": KEYS.http_server, "eos_token_ids": (), "max_model_len": 128}
    with ExitStack() as stack:
        first, second, third = (
            stack.enter_context(ContentCell(num_ranks=num_ranks)) for num_ranks in (1, 2, 1)
        )
        server = HttpServer(make_options(third.service.client_endpoint, **options))
        ports = server.start()
        stack.callback(server.stop, 2)
        whole = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{ports.port}"))
        serving = stack.enter_context(cut_serving(first.service.client_endpoint, **options))
        serving.cut()
        yield Cells(serving, first, second, whole)


def body(salt: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    return asked | {"return_token_ids": True, "cache_salt": salt} | fields


@pytest.mark.parametrize(("num_steps", "stream"), [(2, True), (5, False), (11, True), (12, False)])
def test_an_answer_is_the_one_that_it_would_have_been(
    cells: Cells, num_steps: int, stream: bool
) -> None:
    """Its usage says what the first engine had in store, which knew a part of the prompt; the second one knew none."""
    asked = body(
        f"{num_steps} {stream}",
        stream=stream,
        logprobs=2,
        echo=not stream,
        return_routed_experts="weights",
    )
    if stream:
        asked["stream_options"] = {"include_usage": True}
    warm = asked | {"stream": False, "max_tokens": 1, "prompt": PROMPT[:9]}
    cells.undisturbed.post(COMPLETIONS, json=warm)
    cells.serving.lead_to(cells.first.service.client_endpoint)
    cells.serving.client.post(COMPLETIONS, json=warm)
    told = cells.loses_first(asked, num_steps)
    assert facts(told) == facts(cells.undisturbed.post(COMPLETIONS, json=asked))


@pytest.mark.parametrize("num_steps", [1, 8])
def test_choices_and_prompts_move_together(cells: Cells, num_steps: int) -> None:
    asked = body(
        f"together {num_steps}",
        prompt=[PROMPT, PROMPT[3:]],
        n=2,
        return_routed_experts=True,
        temperature=1,
    )
    told = cells.loses_first(asked, num_steps)
    assert facts(told) == facts(cells.undisturbed.post(COMPLETIONS, json=asked))


def body_of_any_kind(rng: random.Random, number: int) -> dict[str, Any]:
    prompt = [rng.randrange(1, 97) for _ in range(rng.randrange(1, 30))]
    fields = rng.choice(
        [
            {"n": 2, "temperature": 1},
            {"stream": True, "return_routed_experts": "weights"},
            {"echo": True, "logprobs": 1},
            {"max_tokens": 0, "echo": True, "logprobs": 1},
            {"stream": True, "logprobs": 3, "min_tokens": 1},
            {"prompt_logprobs": 1, "return_routed_experts": True},
        ]
    )
    asked = {"prompt": prompt, "max_tokens": rng.randrange(1, 40)}
    return body(f"any {number}", **(asked | fields))


def patient(client: httpx.Client, asked: dict[str, Any]) -> httpx.Response:
    """Its client comes again when it is told to."""
    while (answer := client.post(COMPLETIONS, json=asked)).status_code == 503:
        assert LOST in answer.text
    return answer


def but_sources(answer: httpx.Response) -> str:
    return re.sub(r'"prompt_tokens_details":{[^}]*}', "", facts(answer))


def test_many_answers_of_every_kind_move_twice(cells: Cells) -> None:
    """Wherever each of them is just then, in the queue or between two tokens. The first engine, which in truth lived,
    has in store what it had computed of those that had not begun for their clients."""
    rng = random.Random(2)
    asked = [body_of_any_kind(rng, number) for number in range(12)]
    cells.serving.lead_to(cells.first.service.client_endpoint)
    answers = [cells.serving.pool.submit(patient, cells.serving.client, one) for one in asked]
    for cell, other in ((cells.first, cells.second), (cells.second, cells.first)):
        steps = cell.ranks.content.steps
        num_steps = len(steps) + rng.randrange(3, 12)
        wait_until(lambda steps=steps, end=num_steps: len(steps) >= end)
        cells.serving.cut()
        cells.serving.lead_to(other.service.client_endpoint)
    for one, answer in zip(asked, answers, strict=True):
        whole = cells.undisturbed.post(COMPLETIONS, json=one)
        assert but_sources(answer.result(30)) == but_sources(whole)
    cells.wait_until_idle()
    cells.serving.cut()


def test_a_stop_string_is_found_behind_the_loss(cells: Cells) -> None:
    whole = cells.undisturbed.post(COMPLETIONS, json=body("stop")).json()
    text = whole["choices"][0]["text"]
    asked = body("stop again", stop=[text[-4:]], return_routed_experts=True)
    told = cells.loses_first(asked, 4)
    assert told.json()["choices"][0]["finish_reason"] == "stop"
    assert facts(told) == facts(cells.undisturbed.post(COMPLETIONS, json=asked))


def test_the_prefix_store_of_the_second_engine_holds_what_it_computed(cells: Cells) -> None:
    asked = body("stored")
    cells.loses_first(asked, 6)
    cells.serving.lead_to(cells.second.service.client_endpoint)
    details = cells.serving.client.post(COMPLETIONS, json=asked).json()["usage"]
    assert details["prompt_tokens_details"]["cached_tokens"] == 20
    cells.serving.cut()
