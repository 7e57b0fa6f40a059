"""What evaluations and trainers send: many prompts with one beginning, scored at once; chats whose routes come turn by
turn. Against transformers, and counted."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.scores import ScoreColumns
from tests.helpers.equality import ROUTE_MARGIN, ReferenceModel
from tests.helpers.oracle import compare_routes, load_reference
from tests.helpers.states import (
    BLOCK_SIZE,
    Bench,
    ObservedRanks,
    RequestRun,
    observed_ranks,
    random_prompt,
)
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR, write_tiny_checkpoint

TOLERANCE = 1e-4
NUM_RANKS = 2
SHOTS = random_prompt(1500, seed=701)
QUESTIONS = [random_prompt(10 + number, seed=710 + number) for number in range(12)]
NUM_TURNS = 5
REFERENCE_CHUNK = 2048
"""Tokens whose attention scores are in memory at once."""


@pytest.fixture(scope="module")
def observed() -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=NUM_RANKS, num_kv_blocks=400) as observed:
        yield observed


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(DEMO_MODEL_DIR)


@dataclass(frozen=True, eq=False)
class SharedReference:
    """transformers' log-probs of sequences that begin alike: the beginning is computed once, the rest reads its KV.

    logits: [V] after the beginning
    """

    model: torch.nn.Module
    beginning: list[int]
    cache: object
    logprobs: list[float]
    logits: torch.Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: torch.nn.Module, beginning: list[int]) -> "SharedReference":
        cache, parts = None, []
        for start in range(0, len(beginning), REFERENCE_CHUNK):
            chunk = torch.tensor([beginning[start : start + REFERENCE_CHUNK]])
            output = model(chunk, cache=cache, use_cache=True)
            cache = output.cache
            parts.append(output.logits[0].float())
        logits = torch.cat(parts)
        logprobs = _chosen(logits[:-1], beginning[1:])
        return SharedReference(model, beginning, cache, logprobs, logits[-1])

    @torch.no_grad()
    def logprobs_with(self, rest: list[int]) -> list[float]:
        """Of all tokens from the second on."""
        cache = copy.deepcopy(self.cache)
        output = self.model(torch.tensor([rest]), cache=cache, use_cache=True)
        logits = torch.cat([self.logits[None], output.logits[0, :-1].float()])
        return [*self.logprobs, *_chosen(logits, rest)]


def _chosen(logits: torch.Tensor, token_ids: list[int]) -> list[float]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen: list[float] = logprobs[torch.arange(len(token_ids)), token_ids].tolist()
    return chosen


def prompt_scores(bench: Bench, seq_id: int) -> ScoreColumns:
    scores = bench.harness.generations[f"r{seq_id}"].prompt_scores
    assert scores is not None
    return scores


def tokens_of_ranks(bench: Bench) -> dict[str, float]:
    """Computed or replayed, by rank."""
    samples = bench.harness.metrics.rank_tokens.collect()[0].samples
    told: dict[str, float] = {}
    for sample in samples:
        if sample.name.endswith("_total") and sample.labels["source"] != "cached":
            told[sample.labels["rank"]] = told.get(sample.labels["rank"], 0) + sample.value
    return told


def submit_evaluation(bench: Bench, num_listed: int) -> list[int]:
    return [
        bench.submit(
            [*SHOTS, *question],
            0,
            score_prompt=True,
            num_prompt_alternatives=num_listed,
            return_routes=False,
        )
        for question in QUESTIONS
    ]


def test_a_few_shot_evaluation_computes_its_shots_once_per_rank_and_scores_as_transformers_does(
    observed: ObservedRanks, reference: ReferenceModel
) -> None:
    """Then with five alternatives, which are computed in one pass for all, and again, when they are not."""
    bench = observed.bench(budget=512, fragment_tokens=128)
    seq_ids = submit_evaluation(bench, 1)
    bench.finish()
    shared = SharedReference.of(reference.model, SHOTS)
    for seq_id, question in zip(seq_ids, QUESTIONS, strict=True):
        assert prompt_scores(bench, seq_id).chosen_logprobs.tolist() == pytest.approx(
            shared.logprobs_with(question), abs=TOLERANCE
        )
    of_ranks = tokens_of_ranks(bench)
    own = sum(len(SHOTS) % BLOCK_SIZE + len(question) for question in QUESTIONS)
    assert sum(of_ranks.values()) <= NUM_RANKS * len(SHOTS) + own
    assert max(of_ranks.values()) <= len(SHOTS) + own
    assert bench.num_gate_tokens <= len(SHOTS) + own
    submit_evaluation(bench, 5)
    bench.finish()
    assert sum(tokens_of_ranks(bench).values()) <= (NUM_RANKS + 1) * len(SHOTS) + 2 * own
    submit_evaluation(bench, 5)
    bench.finish()
    assert sum(tokens_of_ranks(bench).values()) <= (NUM_RANKS + 1) * len(SHOTS) + 3 * own


def assert_scored_after_another(
    observed: ObservedRanks, model: torch.nn.Module, beginning: list[int], evicted: str | None
) -> None:
    """The first score after the beginning comes out of its last token, which is cached or replayed."""
    bench = observed.bench(budget=512)
    first = bench.submit([*beginning, *QUESTIONS[0]], 1, score_prompt=True)
    bench.finish()
    if evicted == "kv":
        bench.harness.engine.evict(evicted)
    second = bench.submit([*beginning, *QUESTIONS[1]], 1, score_prompt=True)
    bench.finish()
    completion = bench.run_of(second).completion
    num_stored = len(beginning) // BLOCK_SIZE * BLOCK_SIZE
    assert completion.cached_tokens + completion.replayed_tokens in (num_stored, num_stored - 1)
    shared = SharedReference.of(model, beginning)
    for seq_id, question in ((first, QUESTIONS[0]), (second, QUESTIONS[1])):
        scores = prompt_scores(bench, seq_id).chosen_logprobs.tolist()
        expected = shared.logprobs_with(question)
        place = len(beginning) - 1
        assert scores[place:] == pytest.approx(expected[place:], abs=TOLERANCE)


@pytest.mark.parametrize("length", [255, 256, 257])
@pytest.mark.parametrize("evicted", [None, "kv"])
def test_the_first_token_after_a_shared_beginning_is_scored_as_transformers_does(
    observed: ObservedRanks, reference: ReferenceModel, length: int, evicted: str | None
) -> None:
    assert_scored_after_another(observed, reference.model, SHOTS[:length], evicted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("length", [2**14 - 1, 2**14, 2**14 + 1])
def test_a_beginning_of_16k_tokens_is_no_different(tmp_path: Path, length: int) -> None:
    write_tiny_checkpoint(tmp_path, seed=703, max_position_embeddings=2**15)
    with observed_ranks(tmp_path, ep_size=1, num_kv_blocks=2**11) as observed:
        for evicted in (None, "kv"):
            beginning = random_prompt(length, seed=702)
            assert_scored_after_another(observed, load_reference(tmp_path), beginning, evicted)


def conversation(bench: Bench, *, evicting: bool) -> list[RequestRun]:
    """Every turn sends all that was said before, its answers included."""
    runs: list[RequestRun] = []
    said: list[int] = []
    for turn in range(NUM_TURNS):
        said = [*said, *random_prompt(20 + 3 * turn, seed=730 + turn)]
        runs.append(bench.generate(said, 9 + turn))
        said = [*said, *runs[-1].token_ids]
        if evicting:
            bench.harness.engine.evict("kv")
    return runs


@pytest.fixture(scope="module")
def turns(observed: ObservedRanks) -> list[RequestRun]:
    return conversation(observed.bench(budget=64), evicting=False)


def test_routes_of_a_chats_turns_are_those_of_one_forward_of_the_whole_conversation(
    observed: ObservedRanks, reference: ReferenceModel, turns: list[RequestRun]
) -> None:
    assert any(run.completion.cached_tokens for run in turns)
    whole = [*turns[-1].prompt, *turns[-1].token_ids]
    cold = observed.bench(budget=512, route_replay=False).generate(whole, 1)
    assert (cold.completion.cached_tokens, cold.completion.replayed_tokens) == (0, 0)
    for run in turns:
        num_tokens = len(run.computed_token_ids)
        assert run.routes.num_tokens == num_tokens
        expected = cold.routes.slice(0, num_tokens)
        assert run.routes.topk_ids.tobytes() == expected.topk_ids.tobytes()
        assert run.routes.topk_weights.tobytes() == expected.topk_weights.tobytes()
    agreement = compare_routes(cold.routes, reference.pass_of(whole))
    assert agreement.num_tokens == len(whole) or agreement.margin < ROUTE_MARGIN


@pytest.mark.parametrize("fragment_tokens", [0, 32], ids=["negotiated", "planned"])
def test_routes_of_turns_without_kv_are_the_same_bytes(
    observed: ObservedRanks, turns: list[RequestRun], fragment_tokens: int
) -> None:
    bench = observed.bench(budget=64, fragment_tokens=fragment_tokens)
    again = conversation(bench, evicting=True)
    assert sum(run.completion.cached_tokens for run in again) == 0
    assert all(run.completion.replayed_tokens for run in again[1:])
    for run, first in zip(again, turns, strict=True):
        assert run.token_ids == first.token_ids
        assert run.routes.topk_ids.tobytes() == first.routes.topk_ids.tobytes()
        assert run.routes.topk_weights.tobytes() == first.routes.topk_weights.tobytes()


def test_a_rank_that_replays_has_the_same_ranks_and_log_probs(observed: ObservedRanks) -> None:
    """Scored as a first request with twenty alternatives, and again over kept KV by its routes."""
    prompt = [*SHOTS[:100], *QUESTIONS[0]]
    bench = observed.bench(budget=64)
    first, again = (
        bench.submit(prompt, 1, score_prompt=True, num_prompt_alternatives=20) for _ in range(2)
    )
    bench.finish()
    for name in ("chosen_logprobs", "chosen_ranks", "top_ids", "top_logprobs"):
        a, b = (getattr(prompt_scores(bench, seq_id), name) for seq_id in (first, again))
        assert np.array_equal(a, b)
