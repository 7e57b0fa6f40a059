"""What clients get from `pointsman serve` with the demo model on four ranks, over real sockets."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.helpers.served import eventually
from tests.integration.api import CellApi, completion_body, random_prompt, source_of

pytestmark = pytest.mark.ray
BLOCK_SIZE = 16


def test_a_chat_answers_the_same_streamed_and_whole(openai: OpenAI) -> None:
    question: Any = {
        "model": "minnow",
        "messages": [{"role": "user", "content": "What is expert parallelism?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = openai.chat.completions.create(**question)
    streamed = openai.chat.completions.create(**question, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert whole.choices[0].message.content == text != ""
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0


def test_a_completion_answers_the_same_streamed_and_whole(openai: OpenAI) -> None:
    question: Any = {
        "model": "minnow",
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = openai.completions.create(**question)
    streamed = openai.completions.create(
        **question, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(streamed)
    assert whole.choices[0].text == "".join(c.choices[0].text for c in chunks if c.choices) != ""
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("num_prompt_tokens", [175, 176])
def test_a_prefix_is_computed_then_cached_then_replayed_without_the_gate(
    api: CellApi, num_prompt_tokens: int
) -> None:
    prompt = random_prompt(num_prompt_tokens, num_prompt_tokens)
    num_output = 8
    blocks = BLOCK_SIZE * (num_prompt_tokens // BLOCK_SIZE)
    answers, gated = [], []
    for evict_first in (False, False, True):
        if evict_first:
            api.evict("kv")
        before = api.metric("gate_tokens_total")
        answers.append(api.complete(prompt, num_output, return_routed_experts="weights"))
        gated.append(api.metric("gate_tokens_total") - before)
    cached = BLOCK_SIZE * ((num_prompt_tokens - 1) // BLOCK_SIZE)
    # a KV hit stops before the last prompt token, a replay may include it
    assert [source_of(answer) for answer in answers] == [
        (0, 0),
        (cached, blocks - cached),
        (0, blocks),
    ]
    decoded = num_output - 1  # the last token is never an input
    with_routes = [0, blocks, blocks]
    assert gated == [num_prompt_tokens - routed + decoded for routed in with_routes]
    choices = [answer["choices"][0] for answer in answers]
    assert choices[0]["text"] == choices[1]["text"] == choices[2]["text"]
    for field in ("routed_range", "routed_experts"):
        assert choices[0][field] == choices[1][field] == choices[2][field]


def test_cached_tokens_are_seen_by_the_sdk(openai: OpenAI) -> None:
    prompt: Any = random_prompt(3, 100)
    for _ in range(2):
        answer = openai.completions.create(model="minnow", prompt=prompt, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 96


def test_metrics_have_the_promised_names(api: CellApi) -> None:
    names = {name for name, _ in api.metrics()}
    counters = {
        "gate_tokens_total", "generation_tokens_total", "prefix_store_bytes", "prefix_store_evictions_total",
        "prefix_store_nodes", "prompt_tokens_total", "rank_tokens_total", "replay_fallbacks_total",
        "requests_finished_total", "requests_running", "requests_waiting", "route_conflicts_total", "steps_total",
        "kv_blocks_free", "kv_blocks_used", "expert_load_balancedness",
    }  # fmt: skip
    histograms = {
        "combine_seconds", "dispatch_seconds", "e2e_request_latency_seconds", "gate_seconds",
        "inter_token_latency_seconds", "step_seconds", "time_to_first_token_seconds",
    }  # fmt: skip
    wanted = counters | {f"{name}_bucket" for name in histograms}
    assert {f"pointsman_{name}" for name in wanted} <= names


def test_the_cell_is_counted_once(api: CellApi) -> None:
    before = api.metrics()
    api.complete(random_prompt(4, 40), 5)
    after = api.metrics()
    rise = {key: after[key] - before[key] for key in after if key[0].endswith("_total")}
    assert rise["pointsman_prompt_tokens_total", ("computed",)] == 40
    assert rise["pointsman_generation_tokens_total", ()] == 5
    assert rise["pointsman_requests_finished_total", ("length",)] == 1
    by_rank = [
        value
        for (name, _), value in rise.items()
        if name == "pointsman_rank_tokens_total" and value
    ]
    assert by_rank == [44]


def test_users_cannot_add_series(api: CellApi) -> None:
    api.complete(random_prompt(5, 20), 2)
    before = set(api.metrics())
    for number in range(8):
        api.complete(random_prompt(6, 20), 2, cache_salt=f"tenant-{number}", user=f"user-{number}")
        api.http.get(f"{api.base_url}/v1/models/no-{number}")
        api.http.post(f"{api.base_url}/v1/completions", json={"model": f"no-{number}"})
    assert set(api.metrics()) == before


def test_a_client_that_leaves_mid_stream_stops_its_request(api: CellApi) -> None:
    before = api.metrics()
    body = completion_body(random_prompt(7, 64), 1500, stream=True)
    with api.http.stream("POST", f"{api.base_url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
    assert api.is_idle()
    after = api.metrics()
    aborted = ("pointsman_requests_finished_total", ("abort",))
    assert after[aborted] - before[aborted] == 1
    generated = ("pointsman_generation_tokens_total", ())
    assert 0 < after[generated] - before[generated] < 1500
    api.evict("all")
    assert api.status()["kv_blocks_used"] == [0, 0, 0, 0]


def test_fifty_clients_at_once_each_get_what_they_get_alone(api: CellApi) -> None:
    prompts = [random_prompt(100 + number, 12 + number) for number in range(50)]
    alone = [api.complete(prompt, 4)["choices"][0]["text"] for prompt in prompts]
    api.evict("all")
    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(lambda prompt: api.complete(prompt, 4), prompts))
    assert [answer["choices"][0]["text"] for answer in together] == alone


def test_every_one_of_fifty_that_leave_gives_its_blocks_back(api: CellApi) -> None:
    before = api.metrics()
    opened = threading.Barrier(50)

    def leave_early(number: int) -> None:
        body = completion_body(random_prompt(200 + number, 20), 1500, stream=True)
        with (
            httpx.Client(timeout=60.0) as client,
            client.stream("POST", f"{api.base_url}/v1/completions", json=body) as stream,
        ):
            next(stream.iter_lines())
            opened.wait(60.0)

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(leave_early, range(50)))
    aborted = ("pointsman_requests_finished_total", ("abort",))
    eventually(lambda: api.metrics()[aborted] - before[aborted] == 50, 10.0, "fifty aborts")
    assert api.is_idle()
    api.evict("all")
    assert api.status()["kv_blocks_used"] == [0, 0, 0, 0]
