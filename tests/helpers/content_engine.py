"""An engine over workers whose KV slots hold digests of all they depend on: output must equal an undisturbed run."""

import random
from collections.abc import Callable

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.content_workers import (
    SHAPE,
    VOCAB,
    ContentWorkers,
    oracle,
)
from tests.helpers.engines import EngineHarness, Generation


def make_harness(num_ranks: int = 1, block_size: int = 4, **options) -> EngineHarness:
    workers = ContentWorkers(num_ranks, block_size, frame_delay=options.pop("frame_delay", 0))
    return EngineHarness(workers, SHAPE, num_ranks=num_ranks, block_size=block_size, **options)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def assert_undisturbed(generation: Generation, prompt: list[int], max_tokens: int) -> None:
    tokens, routes = oracle(prompt, max_tokens)
    assert generation.token_ids == tokens
    assert generation.completion is not None
    assert generation.completion.finish_reason == "length"
    np.testing.assert_array_equal(generation.routes.topk_ids, routes)


def read_metrics(harness: EngineHarness) -> Callable[[str], dict[str, float]]:
    """Samples of one metric by the value of their label, "" without one."""
    families = list(text_string_to_metric_families(harness.metrics.render().decode()))

    def sample(name: str) -> dict[str, float]:
        samples = [s for family in families for s in family.samples]
        found = [s for s in samples if s.name == f"pointsman_{name}"]
        return {"".join(s.labels.values()): s.value for s in found}

    return sample
