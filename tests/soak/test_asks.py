from collections.abc import Callable

import pytest

from loadtest.workload import PromptRequest
from tests.soak.asks import Ask, ask_of
from tests.soak.trace import due_asks, rows_of

REQUEST = PromptRequest(tuple(range(16, 60)), 5)
ASKS = [ask_of(1, number, REQUEST) for number in range(2000)]


def test_a_request_follows_from_seed_and_number() -> None:
    assert [ask_of(1, number, REQUEST) for number in range(50)] == ASKS[:50]
    assert [ask_of(2, number, REQUEST) for number in range(50)] != ASKS[:50]


@pytest.mark.parametrize(
    "is_of",
    [
        lambda ask: ask.leaves_after_seconds is not None,
        lambda ask: ask.leaves_after_events is not None,
        lambda ask: ask.is_refused,
        lambda ask: "cache_salt" in ask.body,
        lambda ask: ask.body.get("n", 1) > 1,
        lambda ask: ask.body.get("echo", False),
        lambda ask: "return_routed_experts" in ask.body,
        lambda ask: "tools" in ask.body,
        lambda ask: "structured_outputs" in ask.body,
    ],
)  # fmt: skip
def test_each_kind_of_request_and_of_leaving_comes_often(is_of: Callable[[Ask], bool]) -> None:
    assert sum(map(is_of, ASKS)) >= 20


def test_the_trace_begins_again_with_other_tokens_and_goes_on_in_time() -> None:
    rows = rows_of(None, seed=3)
    due = due_asks(rows, seed=3, speed=10.0)
    first = [next(due) for _ in range(2 * len(rows))]
    seconds = [second for second, _ in first]
    prompts = [tuple(ask.body["prompt"]) for _, ask in first if "prompt" in ask.body]
    assert seconds == sorted(seconds)
    assert seconds[-1] > rows[-1].arrival_seconds / 10.0
    assert len(set(prompts)) > len(prompts) // 2
