"""Ranks with nothing of their own to do still serve their experts."""

from collections.abc import Iterator

import pytest

from tests.helpers.equality import ReferenceModel
from tests.helpers.states import ObservedRanks, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

EP_SIZE = 4


@pytest.fixture(scope="module")
def observed() -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=EP_SIZE) as observed:
        yield observed


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(DEMO_MODEL_DIR)


@pytest.mark.parametrize("length", [1, 2, 3, 40], ids="{}_tokens".format)
def test_one_request_is_served_by_four_ranks(
    observed: ObservedRanks, reference: ReferenceModel, length: int
) -> None:
    run = observed.bench(budget=512).generate(random_prompt(length, seed=80), 6)
    assert reference.compare(run).failures == ()


@pytest.mark.parametrize("num_requests", [2, 3, 5])
def test_requests_of_one_token_each_leave_ranks_idle(
    observed: ObservedRanks, reference: ReferenceModel, num_requests: int
) -> None:
    bench = observed.bench(budget=512)
    seq_ids = [bench.submit(random_prompt(1, seed=81 + n), 3 + n) for n in range(num_requests)]
    bench.finish()
    runs = [bench.run_of(seq_id) for seq_id in seq_ids]
    assert [reference.compare(run).failures for run in runs] == [()] * num_requests


def test_idle_ranks_do_not_change_what_a_busy_rank_computes(observed: ObservedRanks) -> None:
    prompt = random_prompt(30, seed=90)
    alone = observed.bench(budget=512).generate(prompt, 6)
    bench = observed.bench(budget=512)
    seq_ids = [bench.submit(p, 6) for p in (prompt, *(random_prompt(30, seed=s) for s in (91, 92)))]
    bench.finish()
    assert bench.run_of(seq_ids[0]).token_ids == alone.token_ids
