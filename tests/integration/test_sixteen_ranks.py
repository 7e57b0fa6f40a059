"""Sixteen ranks over real sockets: computed, cached, replayed by plans or without, an answer is the same bytes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from openai import OpenAI

from cluster.messages import Completion
from cluster.model_config.read import read_model_spec
from cluster.routes import ExpertRoutes
from deploy.planning import DEMO_MODEL
from router_service.plan_limits import FRAGMENT_BLOCKS
from tests.helpers.equality import ReferenceModel
from tests.helpers.served import Served
from tests.helpers.states import RequestRun
from tests.integration.answers import EVERYTHING, Answer, answer_of, answer_of_pieces
from tests.integration.api import CellApi, MetricValues, random_prompt, source_of

pytestmark = [pytest.mark.ray, pytest.mark.alone, pytest.mark.timeout(600)]
START_SECONDS = 360.0
"""Longer than `cell.start_timeout_seconds`: a start that takes too long says what it waited for."""
STOP_SECONDS = 60.0
"""Eighteen actors, perhaps on few cores."""
NUM_RANKS = 16
BLOCK_SIZE = 16
MAX_TOKENS = 4
SPEC = read_model_spec(DEMO_MODEL)
NUM_LAYERS = SPEC.num_moe_layers
EXPERTS_PER_RANK = SPEC.gate.num_experts // NUM_RANKS
NEGOTIATED_MESSAGES = 3 * NUM_LAYERS * NUM_RANKS * (NUM_RANKS - 1)
"""Of one step: counts, rows and results, from every rank to every other one."""
PLANNED_SHARE = 0.95


@pytest.fixture(scope="module")
def sixteen_ranks() -> Iterator[Served]:
    """One `pointsman serve` for all. A test brings prompts or a `cache_salt` of its own and leaves all features on.

    A replay waits for its plan however busy the machine is. The KV pools are small: sixteen of the default size are a
    gigabyte.
    """
    with Served(
        *("--ep-size", "16", "--deterministic"),
        *("--num-kv-blocks", "64", "--max-model-len", "1024"),
        *("--set", "scheduler.plan_wait_seconds=60"),
    ) as served:
        served.wait_until_ready(START_SECONDS)
        yield served
        served.interrupt()
        assert served.wait(STOP_SECONDS) == 0
        served.assert_nothing_left(STOP_SECONDS)


@pytest.fixture
def api(sixteen_ranks: Served) -> Iterator[CellApi]:
    with CellApi(sixteen_ranks.base_url, sixteen_ranks.admin_url) as api:
        yield api
        assert api.is_idle()


def replayed_by(rise: MetricValues, way: str) -> float:
    return rise["pointsman_replayed_tokens_total", (way,)]


def planned_share(rise: MetricValues) -> float:
    """Of the tokens that were replayed."""
    planned = replayed_by(rise, "planned")
    return planned / (planned + replayed_by(rise, "negotiated"))


def num_steps_with_plans(rise: MetricValues) -> float:
    return sum(rise.get(("pointsman_steps_total", (way,)), 0.0) for way in ("planned", "mixed"))


@dataclass(frozen=True)
class ThreeStates:
    """One prompt computed, then found in KV, then replayed without KV; what the last of them added to the metrics."""

    answers: list[Answer]
    sources: list[tuple[int, int]]
    rise: MetricValues


PROMPT = random_prompt(1600, 13 * BLOCK_SIZE)
"""Whole blocks only, so that a KV hit and a replay end at different tokens."""


@pytest.fixture(scope="module")
def three_states(sixteen_ranks: Served) -> ThreeStates:
    with CellApi(sixteen_ranks.base_url, sixteen_ranks.admin_url) as api:
        bodies = [api.complete(PROMPT, MAX_TOKENS, **EVERYTHING) for _ in range(2)]
        api.evict("kv")
        before = api.metrics()
        bodies.append(api.complete(PROMPT, MAX_TOKENS, **EVERYTHING))
        return ThreeStates(
            answers=[answer_of(body) for body in bodies],
            sources=[source_of(body) for body in bodies],
            rise=api.rise_since(before),
        )


def test_the_cell_has_sixteen_ranks_each_a_process_below_the_server(
    api: CellApi, sixteen_ranks: Served
) -> None:
    status = api.status()
    assert status["ep_size"] == NUM_RANKS
    assert len(status["kv_blocks_free"]) == NUM_RANKS
    workers = set(sixteen_ranks.pids_of("ExpertWorker"))
    assert workers == {sixteen_ranks.pid_of_rank(rank) for rank in range(NUM_RANKS)}
    below = psutil.Process(sixteen_ranks.process.pid).children(recursive=True)
    assert workers <= {process.pid for process in below}


def test_a_chat_answers_the_same_streamed_and_whole(sixteen_ranks: Served) -> None:
    question: Any = {
        "model": "minnow",
        "messages": [{"role": "user", "content": "What does a pointsman do?"}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    base_url = f"{sixteen_ranks.base_url}/v1"
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0) as openai:
        whole = openai.chat.completions.create(**question)
        chunks = list(openai.chat.completions.create(**question, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text != ""


def test_a_prompt_is_computed_then_cached_then_replayed(three_states: ThreeStates) -> None:
    whole, before_the_last_token = len(PROMPT), len(PROMPT) - BLOCK_SIZE
    assert three_states.sources == [(0, 0), (before_the_last_token, BLOCK_SIZE), (0, whole)]


def test_computed_cached_and_replayed_answers_are_the_same_bytes(three_states: ThreeStates) -> None:
    cold, hit, replayed = three_states.answers
    assert cold.routed_range == (0, len(PROMPT) + MAX_TOKENS - 1)
    assert hit == cold
    assert replayed == cold


def test_a_replay_travels_by_plans_and_past_the_gate(three_states: ThreeStates) -> None:
    rise = three_states.rise
    assert replayed_by(rise, "planned") + replayed_by(rise, "negotiated") == len(PROMPT)
    assert planned_share(rise) >= PLANNED_SHARE
    fallbacks = sum(rise[key] for key in rise if key[0] == "pointsman_replay_fallbacks_total")
    assert fallbacks <= (1 - PLANNED_SHARE) * len(PROMPT)
    assert num_steps_with_plans(rise) >= 1
    assert rise["pointsman_gate_tokens_total", ()] == MAX_TOKENS - 1


def replaying_rank(rise: MetricValues) -> int:
    (rank,) = [
        int(labels[0])
        for (name, labels), value in rise.items()
        if name == "pointsman_rank_tokens_total" and labels[1] == "replayed" and value
    ]
    return rank


def planned_messages(routes: ExpertRoutes, home_rank: int, num_steps: int) -> int:
    """One there and one back in every step and MoE layer for every other rank that has an expert of the step's tokens;
    from one rank alone no layer is dense. The prompt is replayed in one step or in one per fragment."""
    num_tokens = len(PROMPT) if num_steps == 1 else FRAGMENT_BLOCKS * BLOCK_SIZE
    starts = range(0, len(PROMPT), num_tokens)
    assert len(starts) == num_steps
    ranks = routes.slice(0, len(PROMPT)).topk_ids // EXPERTS_PER_RANK
    visited = [
        set(ranks[start : start + num_tokens, layer].ravel().tolist()) - {home_rank}
        for start in starts
        for layer in range(NUM_LAYERS)
    ]
    return 2 * sum(map(len, visited))


def test_a_planned_replay_sends_one_message_per_rank_with_rows_and_a_decode_to_every_rank(
    three_states: ThreeStates,
) -> None:
    rise = three_states.rise
    num_planned_steps = int(rise["pointsman_steps_total", ("planned",)])
    expected = planned_messages(
        three_states.answers[0].routes, replaying_rank(rise), num_planned_steps
    )
    assert rise["pointsman_exchange_messages_total", ("planned",)] == expected > 0
    decodes = rise["pointsman_exchange_messages_total", ("negotiated",)]
    assert decodes == (MAX_TOKENS - 1) * NEGOTIATED_MESSAGES
    assert expected / num_planned_steps < NEGOTIATED_MESSAGES / 20


def test_plans_off_and_on_again_do_not_change_the_answer(switching: CellApi) -> None:
    api, prompt = switching, random_prompt(1601, 12 * BLOCK_SIZE + 5)
    cold = answer_of(api.complete(prompt, MAX_TOKENS, **EVERYTHING))
    answers, ways = [], []
    for is_on in (False, True):
        api.features(planned_dispatch=is_on)
        api.evict("kv")
        before = api.metrics()
        answers.append(answer_of(api.complete(prompt, MAX_TOKENS, **EVERYTHING)))
        rise = api.rise_since(before)
        ways.append([replayed_by(rise, way) for way in ("negotiated", "planned")])
    assert answers == [cold, cold]
    assert ways == [[192, 0], [0, 192]]


def test_streams_that_replay_one_prefix_at_once_answer_what_each_prompt_answers_cold(
    api: CellApi,
) -> None:
    prefix = random_prompt(1602, 10 * BLOCK_SIZE)
    prompts = [prefix + random_prompt(1610 + n, 3 + 4 * n) for n in range(3)]
    cold = [
        answer_of(api.complete(prompt, MAX_TOKENS, cache_salt=f"alone-{n}", **EVERYTHING))
        for n, prompt in enumerate(prompts)
    ]
    api.complete(prefix, 1)
    api.evict("kv")
    before = api.metrics()
    with ThreadPoolExecutor(9) as pool:
        streams = pool.map(lambda p: api.stream(p, MAX_TOKENS, **EVERYTHING), prompts * 3)
        answers = [answer_of_pieces(pieces) for pieces in streams]
    rise = api.rise_since(before)
    assert answers == cold * 3
    assert replayed_by(rise, "planned") >= len(prefix)
    assert planned_share(rise) >= PLANNED_SHARE
    assert num_steps_with_plans(rise) >= 1


def test_sixteen_ranks_answer_what_transformers_answers(api: CellApi) -> None:
    prompt, max_tokens = random_prompt(1603, 200), 8
    body = api.complete(prompt, max_tokens, **EVERYTHING)
    reference = ReferenceModel(DEMO_MODEL)
    run = _run_of(prompt, answer_of(body))
    assert reference.compare(run).failures == ()
    assert reference.first_other_token(run) is None


def _run_of(prompt: list[int], answer: Answer) -> RequestRun:
    """As far as a client sees it: without logits."""
    completion = Completion(
        finish_reason="length",
        error=None,
        num_output_tokens=len(answer.token_ids),
        cached_tokens=0,
        replayed_tokens=0,
    )
    return RequestRun(prompt, list(answer.token_ids), completion, answer.routes, [])
