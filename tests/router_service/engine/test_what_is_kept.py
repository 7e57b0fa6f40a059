"""What an engine keeps of requests that have ended: nothing, and for that it needs no garbage collector.

The process of a served engine has full collections switched off in all but name, because they would stop it for
seconds: what refers to itself would stay.
"""

import gc
import random
import tracemalloc
from collections.abc import Iterator

import pytest

from cluster.types import StepId
from prefix_store.lease import LeasedPath
from prefix_store.radix_tree import RadixNode
from router_service.publisher import MAX_DISCARDED, Publisher
from router_service.request import Request
from router_service.step_metrics import StepMetrics
from tests.helpers.content_engine import make_harness, make_prompt
from tests.helpers.engines import CLIENT, EngineHarness

KINDS = (Request, LeasedPath, RadixNode)


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_kept() -> dict[str, int]:
    kept = gc.get_objects()
    return {kind.__name__: sum(issubclass(type(o), kind) for o in kept) for kind in KINDS}


def run_traffic(harness: EngineHarness, first: int, rng: random.Random) -> None:
    """Prefixes that are shared and salts that are not, choices, scores, aborts and evictions, with few blocks."""
    for number in range(first, first + 60):
        name, tokens = f"r{number}", make_prompt(rng.randrange(1, 30), seed=rng.randrange(9))
        salt = rng.choice([None, "one", name])
        asked = {"cache_salt": salt, "score_prompt": rng.random() < 0.3}
        harness.submit(name, tokens, rng.randrange(1, 24), **asked)
        if rng.random() < 0.3:
            harness.submit(f"{name}b", tokens, 8, leader_id=name, choice=1, cache_salt=salt)
        for _ in range(rng.randrange(0, 4)):
            if harness.engine.has_work:
                harness.step()
        if rng.random() < 0.3 and harness.generations[name].completion is None:
            harness.engine.abort(CLIENT, name)
        if rng.random() < 0.1:
            harness.engine.evict(rng.choice(["kv", "routes", "scores", "all"]))
    harness.run()
    harness.engine.evict("all")


def test_all_of_a_request_goes_with_it(nothing_is_collected: None) -> None:
    before = num_kept()
    harness = make_harness(2, num_kv_blocks=24, budget=8, max_num_seqs=8, frame_delay=2)
    run_traffic(harness, 0, random.Random(5))
    assert num_kept() == before


def test_steps_that_were_discarded_are_not_remembered_for_ever() -> None:
    harness = make_harness(1)
    observer = StepMetrics(harness.metrics, "local")
    publisher = Publisher(harness.store, 4, harness.features, observer)
    tracemalloc.start()
    for step_id in range(100 * MAX_DISCARDED):
        publisher.discard(StepId(step_id))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 100 * MAX_DISCARDED
