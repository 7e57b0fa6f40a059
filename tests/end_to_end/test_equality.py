"""What the other tests rest on: a comparison that sees one changed bit and judges near-ties by the margin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.messages import Completion
from cluster.routes import ExpertRoutes
from tests.helpers.equality import byte_differences, compare_with_reference
from tests.helpers.observation import LogitRows
from tests.helpers.oracle import Reference
from tests.helpers.states import RequestRun

PROMPT = [5, 6, 7]
NUM_TOKENS, VOCAB = 4, 8


def make_routes() -> ExpertRoutes:
    ids = np.tile(np.array([1, 3], np.uint8), (NUM_TOKENS, 2, 1))
    return ExpertRoutes(ids, np.full(ids.shape, 0.5, np.float32))


def make_logits() -> np.ndarray:
    logits = np.random.default_rng(1).normal(size=(NUM_TOKENS, VOCAB)).astype(np.float32)
    logits[np.arange(NUM_TOKENS), [1, 2, 4, 6]] = 9.0
    return logits


def make_run(
    token_ids: tuple[int, ...] = (4, 6),
    routes: ExpertRoutes | None = None,
    logits: np.ndarray | None = None,
) -> RequestRun:
    routes = routes or make_routes()
    completion = Completion("length", None, 2, 0, 0)
    rows = make_logits() if logits is None else logits
    chunks = [LogitRows(0, rows[:3]), LogitRows(3, rows[3:])]
    return RequestRun(PROMPT, list(token_ids), completion, routes, chunks)


def make_reference(margin: float = 0.1) -> Reference:
    return Reference(
        torch.from_numpy(make_logits()), make_routes(), torch.full((NUM_TOKENS, 2), margin)
    )


def other_routes() -> ExpertRoutes:
    routes = make_routes()
    routes.topk_ids[2, 1, 1] = 7
    return routes


def other_weights() -> ExpertRoutes:
    routes = make_routes()
    routes.topk_weights[3, 0, 0] = np.nextafter(np.float32(0.5), np.float32(1))
    return routes


def other_logits(token: int, token_id: int, value: float) -> np.ndarray:
    logits = make_logits()
    logits[token, token_id] = value
    return logits


def test_equal_runs_differ_in_nothing() -> None:
    assert byte_differences(make_run(), make_run()) == []


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (make_run(token_ids=(4, 5)), "tokens"),
        (make_run(routes=other_routes()), "expert ids"),
        (make_run(routes=other_weights()), "expert weights"),
        (make_run(logits=other_logits(3, 0, 1.25)), "logits"),
        (make_run(routes=make_routes().slice(0, 3)), "expert ids"),
    ],
)
def test_every_difference_is_seen_and_named(run: RequestRun, word: str) -> None:
    assert word in byte_differences(run, make_run())[0]


def test_a_run_like_the_reference_has_all_its_decisions_compare_with_reference() -> None:
    assert (
        compare_with_reference(make_run(), make_reference()).decisions
        == NUM_TOKENS * 2 + NUM_TOKENS
    )


@pytest.mark.parametrize(("margin", "listed", "failed"), [(9e-6, 1, 0), (2e-5, 0, 1)])
def test_a_differing_expert_set_is_listed_only_below_the_margin(
    margin: float, listed: int, failed: int
) -> None:
    comparison = compare_with_reference(make_run(routes=other_routes()), make_reference(margin))
    assert (len(comparison.listed), len(comparison.failures)) == (listed, failed)


def test_nothing_after_a_differing_expert_set_is_compare_with_reference() -> None:
    run = make_run(routes=other_routes(), logits=other_logits(3, 0, 20.0))
    assert compare_with_reference(run, make_reference(9e-6)).failures == ()


def test_a_logit_beyond_the_tolerance_fails() -> None:
    run = make_run(logits=other_logits(1, 2, 9.0002))
    assert "logits" in compare_with_reference(run, make_reference()).failures[0]


@pytest.mark.parametrize(("gap", "listed"), [(9e-5, True), (2e-3, False)])
def test_another_token_is_listed_only_below_the_gap(gap: float, listed: bool) -> None:
    reference = make_reference()
    reference.logits[3, 5] = 9.0 - gap
    run = make_run(token_ids=(4, 5), logits=reference.logits.numpy())
    comparison = compare_with_reference(run, reference)
    assert (bool(comparison.listed), bool(comparison.failures)) == (listed, not listed)


def test_a_request_that_computed_a_token_twice_is_no_baseline() -> None:
    run = make_run()
    with pytest.raises(AssertionError):
        replace(run, chunks=[*run.chunks, run.chunks[0]]).logits()
