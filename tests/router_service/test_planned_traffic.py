"""Random traffic over planned replays: answers undisturbed, no fragment left in use."""

import random
from collections import Counter
from typing import Any

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_prompt, read_metrics
from tests.helpers.engines import CLIENT
from tests.helpers.planned_engine import (
    PlannedCell,
    fallbacks,
    make_planned_cell,
    num_planning_requests,
)


def serve_traffic(cell: PlannedCell, rng: random.Random) -> dict[str, tuple[list[int], int]]:
    """Shared prefixes, aborts, evictions, the switch turned; what was not aborted."""
    stems = [make_prompt(rng.randrange(8, 40), seed=100 + number) for number in range(3)]
    alive: dict[str, tuple[list[int], int]] = {}
    for number in range(50):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randrange(1, len(stem) + 1)], *make_prompt(rng.randrange(9), number)]
        alive[f"r{number}"] = prompt, rng.randrange(1, 16)
        cell.harness.submit(f"r{number}", *alive[f"r{number}"])
        for _ in range(rng.randrange(0, 5)):
            if cell.harness.engine.has_work:
                cell.harness.step()
        victim = rng.choice(list(alive))
        if rng.random() < 0.15 and cell.harness.generations[victim].completion is None:
            cell.harness.engine.abort(CLIENT, victim)
            del alive[victim]
        if rng.random() < 0.25:
            cell.harness.engine.evict(rng.choice(["kv", "kv", "routes", "all"]))
        cell.harness.features.planned_dispatch = rng.random() < 0.9
        cell.check_invariants()
    cell.harness.run()
    return alive


TRAFFIC: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tiny_plan_budget": {"memory_bytes": 1},
    "small_plan_budget": {"memory_bytes": 4000},
    "late": {"max_looks": 6},
    "three_copies_of_every_expert": {"max_looks": 2, "num_copies": 3},
    "late_and_impatient": {"max_looks": 6, "wait_seconds": 0.0},
    "small_steps": {"budget": 9, "max_looks": 3, "memory_bytes": 2000},
    "near_window": {"ahead_tokens": 8, "max_looks": 3, "memory_bytes": 4000},
    "short_runs": {"min_run_tokens": 8, "max_looks": 2},
    "small_pumps": {"max_pump_bytes": 1, "ahead_tokens": 16, "max_looks": 2},
    "few_blocks": {"num_kv_blocks": 16, "max_looks": 3, "memory_bytes": 1},
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", TRAFFIC.values(), ids=TRAFFIC)
def test_random_traffic_stays_undisturbed_and_leaves_no_fragment_in_use(
    options: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 4])
    cell = make_planned_cell(
        num_ranks, rng=rng, **({"num_kv_blocks": 40, "budget": 32, "max_num_seqs": 4} | options)
    )
    for request_id, (prompt, max_tokens) in serve_traffic(cell, rng).items():
        assert_undisturbed(cell.harness.generations[request_id], prompt, max_tokens)
    assert num_planning_requests(cell) == 0


def test_random_traffic_reaches_what_it_is_for() -> None:
    seen: Counter[str] = Counter()
    for options in TRAFFIC.values():
        rng = random.Random(1)
        defaults = {"num_kv_blocks": 40, "budget": 32, "max_num_seqs": 4}
        cell = make_planned_cell(2, rng=rng, **(defaults | options))
        serve_traffic(cell, rng)
        seen += Counter(fallbacks(cell))
        seen += Counter(
            planned=cell.workers.num_planned_tokens,
            evicted=cell.workers.num_evicted_fragments,
            preempted=cell.harness.scheduler.num_preemptions,
            shared=int(read_metrics(cell.harness)("plan_fragment_hits_total")[""]),
        )
    assert set(seen) >= {
        *("planned_off", "too_short", "plan_not_ready", "plan_memory"),
        *("step_budget", "no_border"),
        *("planned", "evicted", "preempted", "shared"),
    }
