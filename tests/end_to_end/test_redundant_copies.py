"""Which copy of an expert serves a token hangs on its position alone: the same bytes cold, replayed with and without
plans, and on another home rank. Also with more experts than a byte counts.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from cluster.placement import ExpertPlacement
from cluster.types import Rank
from tests.helpers.equality import byte_differences
from tests.helpers.placements import redundant_placement
from tests.helpers.states import Bench, ObservedRanks, RequestRun, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR, SHAPE_VARIANTS, write_variant

FRAGMENT_TOKENS = 16
PROMPT = random_prompt(101, seed=71)
NUM_BLOCK_TOKENS = 96
"""Of the prompt's tokens, those in full blocks."""
MAX_TOKENS = 4
REPLAYS = {"negotiated": 0, "planned": FRAGMENT_TOKENS}
"""Fragment tokens by the way that replayed rows travel."""


@pytest.fixture(scope="module", params=[2, 4])
def redundant(request: pytest.FixtureRequest) -> Iterator[ObservedRanks]:
    placement = redundant_placement(64, request.param, seed=5)
    assert set(placement.replica_counts.tolist()) >= {1, 2, 3}
    with observed_ranks(DEMO_MODEL_DIR, ep_size=request.param, placement=placement) as observed:
        yield observed


@pytest.fixture(scope="module", params=["contiguous", "redundant"])
def many_experts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObservedRanks]:
    """320 experts: ids take two bytes."""
    model_dir = tmp_path_factory.mktemp("many-experts")
    write_variant(model_dir, SHAPE_VARIANTS["many_experts"], seed=4)
    placements = {
        "contiguous": ExpertPlacement.contiguous(320, 4),
        "redundant": redundant_placement(320, 4, seed=6),
    }
    placement = placements[request.param]
    with observed_ranks(model_dir, ep_size=4, placement=placement) as observed:
        yield observed


def home_rank_of(bench: Bench, seq_id: int) -> Rank | None:
    (request,) = (r for r in bench.harness.scheduler.running if r.seq_id == seq_id)
    return request.home_rank


def run_on(bench: Bench, rank: int) -> RequestRun:
    """The prompt with `rank` as its home: the ranks before it each hold a sequence that decodes."""
    for number in range(rank):
        bench.submit(random_prompt(9, seed=400 + number), 30)
    bench.step(2)
    seq_id = bench.submit(PROMPT, MAX_TOKENS)
    bench.step(1)
    assert home_rank_of(bench, seq_id) == rank
    bench.finish()
    return bench.run_of(seq_id)


@pytest.mark.parametrize("home", ["same", "other"])
@pytest.mark.parametrize("way", REPLAYS)
def test_a_replay_is_the_bytes_of_the_cold_run_on_any_home_rank(
    redundant: ObservedRanks, way: str, home: str
) -> None:
    bench = redundant.bench(budget=64, fragment_tokens=REPLAYS[way])
    cold = run_on(bench, 0)
    bench.harness.engine.evict("kv")
    last_rank = redundant.ranks.options.ep_size - 1
    replayed = run_on(bench, last_rank if home == "other" else 0)
    assert byte_differences(replayed, cold) == []
    assert bench.replayed_tokens[way] == NUM_BLOCK_TOKENS


def test_a_cold_run_on_another_home_rank_is_the_same_bytes(redundant: ObservedRanks) -> None:
    cold = run_on(redundant.bench(budget=64), 0)
    elsewhere = run_on(redundant.bench(budget=64), redundant.ranks.options.ep_size - 1)
    assert byte_differences(elsewhere, cold) == []


@pytest.mark.parametrize("way", REPLAYS)
def test_ids_of_two_bytes_replay_the_bytes_of_a_cold_run(
    many_experts: ObservedRanks, way: str
) -> None:
    bench = many_experts.bench(budget=64, fragment_tokens=REPLAYS[way])
    cold = run_on(bench, 0)
    assert cold.routes.topk_ids.dtype == np.uint16
    assert cold.routes.topk_ids.max() > 255
    bench.harness.engine.evict("kv")
    assert byte_differences(run_on(bench, 3), cold) == []
    assert bench.replayed_tokens[way] == NUM_BLOCK_TOKENS
