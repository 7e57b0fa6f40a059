"""Scores of cold, cached, replayed and recomputed tokens: the same bytes, and those of transformers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.scores import ScoreColumns
from tests.helpers.equality import ReferenceModel
from tests.helpers.laboratory import DEMO, MODELS, Laboratory
from tests.helpers.states import Bench, ObservedRanks, observed_ranks, random_prompt

TOLERANCE = 1e-4
MAX_TOKENS = 5
LENGTHS = (1, 16, 17, 100)
Scores = npt.NDArray[np.void]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("models"))


CELLS = [(DEMO, 1), (DEMO, 2), ("qwen3", 2)]


@pytest.fixture(scope="module", params=CELLS, ids=lambda cell: f"{cell[0]}-ep{cell[1]}")
def cell(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Model and number of ranks."""
    model, ep_size = request.param
    return model, ep_size


@pytest.fixture(scope="module")
def observed(laboratory: Laboratory, cell: tuple[str, int]) -> Iterator[ObservedRanks]:
    with observed_ranks(laboratory.model_dir(cell[0]), ep_size=cell[1]) as observed:
        yield observed


@pytest.fixture(scope="module")
def reference(laboratory: Laboratory, cell: tuple[str, int]) -> ReferenceModel:
    return laboratory.reference(cell[0])


def scored(bench: Bench, prompt: list[int], **sampling: object) -> tuple[list[int], Scores]:
    """Generated tokens, and the scores of all tokens from the second on."""
    seq_id = bench.submit(prompt, MAX_TOKENS, score_prompt=True, **sampling)
    bench.finish()
    generation = bench.harness.generations[f"r{seq_id}"]
    assert generation.completion is not None
    assert generation.prompt_scores is not None
    parts = [generation.prompt_scores, *generation.scores]
    return generation.token_ids, np.concatenate([part.stored().rows for part in parts])


def assert_close(scores: Scores, token_ids: list[int], reference: ReferenceModel) -> None:
    """The most likely token too, unless the reference holds two of them for nearly equal."""
    logprobs = torch.log_softmax(reference.pass_of(token_ids[:-1]).logits, dim=-1)
    chosen = logprobs[torch.arange(len(token_ids) - 1), token_ids[1:]].numpy()
    best = logprobs.max(dim=-1).values.numpy()
    assert np.abs(scores["chosen_logprob"] - chosen).max() < TOLERANCE
    assert np.abs(scores["top_logprob"] - best).max() < TOLERANCE
    num_before = (logprobs > torch.from_numpy(chosen)[:, None] + TOLERANCE).sum(dim=-1).numpy()
    num_until = (logprobs >= torch.from_numpy(chosen)[:, None] - TOLERANCE).sum(dim=-1).numpy()
    assert (num_before < scores["chosen_rank"]).all()
    assert (scores["chosen_rank"] <= num_until).all()
    of_top_id = logprobs[torch.arange(len(token_ids) - 1), scores["top_id"].astype(np.int64)]
    assert np.abs(of_top_id.numpy() - best).max() < TOLERANCE


@pytest.mark.parametrize("planned", [False, True], ids=["negotiated", "planned"])
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_are_the_same_bytes_in_every_state_and_those_of_transformers(
    observed: ObservedRanks, reference: ReferenceModel, length: int, planned: bool
) -> None:
    prompt = random_prompt(length, seed=300 + length)
    bench = observed.bench(budget=64, fragment_tokens=32 * planned)
    output, cold = scored(bench, prompt)
    assert_close(cold, [*prompt, *output], reference)
    for parts in ((), ("kv",), ("scores",), ("kv", "scores"), ("routes",)):
        for part in parts:
            bench.harness.engine.evict(part)
        again_output, again = scored(bench, prompt)
        assert again_output == output
        assert again.tobytes() == cold.tobytes(), parts


def listed(bench: Bench, prompt: list[int], num_listed: int) -> ScoreColumns:
    """Of the prompt from the second token on."""
    seq_id = bench.submit(prompt, 1, score_prompt=True, num_prompt_alternatives=num_listed)
    bench.finish()
    scores = bench.harness.generations[f"r{seq_id}"].prompt_scores
    assert scores is not None
    assert scores.top_lens.tolist() == [num_listed] * (len(prompt) - 1)
    return scores


def bytes_of(columns: ScoreColumns) -> list[bytes]:
    return [getattr(columns, name).tobytes() for name in ScoreColumns.__struct_fields__]


@pytest.mark.parametrize("num_listed", [5, 20])
def test_alternatives_are_the_same_bytes_in_every_state_and_those_of_transformers(
    observed: ObservedRanks, reference: ReferenceModel, num_listed: int
) -> None:
    prompt = random_prompt(50, seed=450)
    bench = observed.bench(budget=64, fragment_tokens=32)
    cold = listed(bench, prompt, num_listed)
    logprobs = torch.log_softmax(reference.pass_of(prompt[:-1]).logits, dim=-1)
    best = logprobs.topk(num_listed, dim=-1).values.numpy()
    values = cold.top_logprobs.reshape(-1, num_listed)
    ids = torch.from_numpy(cold.top_ids.reshape(-1, num_listed).astype(np.int64))
    assert np.abs(values - best).max() < TOLERANCE
    assert np.abs(values - logprobs.gather(1, ids).numpy()).max() < TOLERANCE
    chosen = logprobs[torch.arange(len(prompt) - 1), prompt[1:]].numpy()
    assert np.abs(cold.chosen_logprobs - chosen).max() < TOLERANCE
    for parts in ((), ("kv",), ("scores",), ("kv", "scores"), ("routes",)):
        for part in parts:
            bench.harness.engine.evict(part)
        assert bytes_of(listed(bench, prompt, num_listed)) == bytes_of(cold), parts


def test_what_is_listed_does_not_depend_on_what_was_asked_before(observed: ObservedRanks) -> None:
    prompt = random_prompt(40, seed=460)
    alone = {n: bytes_of(listed(observed.bench(budget=64), prompt, n)) for n in (1, 5, 20)}
    bench = observed.bench(budget=64)
    for num_listed in (1, 5, 1, 20, 5, 1):
        assert bytes_of(listed(bench, prompt, num_listed)) == alone[num_listed]


@pytest.mark.parametrize("budget", [1, 7, 512])
def test_scores_do_not_depend_on_chunks_and_neighbours(
    observed: ObservedRanks, budget: int
) -> None:
    prompts = [random_prompt(length, seed=400 + length) for length in (40, 17, 3)]
    alone = [scored(observed.bench(budget=64), prompt) for prompt in prompts]
    bench = observed.bench(budget=budget)
    seq_ids = [bench.submit(prompt, MAX_TOKENS, score_prompt=True) for prompt in prompts]
    bench.finish()
    for seq_id, (output, scores) in zip(seq_ids, alone, strict=True):
        generation = bench.harness.generations[f"r{seq_id}"]
        assert generation.token_ids == output
        assert generation.completion is not None
        assert generation.prompt_scores is not None
        parts = [generation.prompt_scores, *generation.scores]
        together = np.concatenate([part.stored().rows for part in parts])
        assert together.tobytes() == scores.tobytes()


def test_scores_of_a_sampled_token_are_those_of_the_raw_distribution(
    observed: ObservedRanks, reference: ReferenceModel
) -> None:
    prompt = random_prompt(20, seed=420)
    bench = observed.bench(budget=64)
    output, scores = scored(bench, prompt, temperature=1.5, top_p=0.9, seed=5)
    assert_close(scores, [*prompt, *output], reference)


def test_alternatives_are_the_most_likely_tokens_in_order(
    observed: ObservedRanks, reference: ReferenceModel
) -> None:
    prompt = random_prompt(30, seed=430)
    bench = observed.bench(budget=64)
    seq_id = bench.submit(prompt, MAX_TOKENS, num_top_logprobs=20)
    bench.finish()
    generation = bench.harness.generations[f"r{seq_id}"]
    token_ids = [*prompt, *generation.token_ids]
    logprobs = torch.log_softmax(reference.pass_of(token_ids[:-1]).logits, dim=-1)
    for place, score in enumerate(generation.scores):
        ids, values = zip(*score.alternatives(0), strict=True)
        assert len(set(ids)) == 20
        assert ids[0] == generation.token_ids[place]  # greedy
        expected = logprobs[len(prompt) - 1 + place].topk(20).values.numpy()
        assert np.abs(np.array(values) - expected).max() < TOLERANCE


@pytest.mark.parametrize("model", [model for model in MODELS if model != DEMO])
def test_every_shape_of_model_has_the_scores_of_transformers(tmp_path: Path, model: str) -> None:
    laboratory = Laboratory(tmp_path)
    directory = laboratory.model_dir(model)
    prompt = random_prompt(40, seed=440, vocab_size=100)
    with observed_ranks(directory, ep_size=1) as observed:
        output, scores = scored(observed.bench(budget=64), prompt)
    assert_close(scores, [*prompt, *output], laboratory.reference(model))
