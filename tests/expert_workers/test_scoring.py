"""Log-probs from logits: those of a plain float64 formula, ties by id, and no row sees its neighbours."""

import numpy as np
import pytest
import torch

from cluster.scores import ScoreColumns
from expert_workers.scoring import score


def make_logits(num_rows: int, vocab: int = 301, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def plain(row: torch.Tensor) -> np.ndarray:
    wide = row.double().numpy()
    shifted = wide - wide.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("top_lens", [[1, 1, 1, 1], [1, 5, 20, 2]])
def test_scores_are_those_of_the_plain_formula(top_lens: list[int]) -> None:
    logits = make_logits(4)
    targets = [7, 0, 300, 41]
    scores = score(logits, targets, top_lens)
    assert scores.top_lens.tolist() == top_lens
    for row, target in enumerate(targets):
        expected = plain(logits[row])
        assert scores.chosen_logprobs[row] == pytest.approx(expected[target], abs=1e-5)
        ids, logprobs = zip(*scores.alternatives(row), strict=True)
        best = np.argsort(-expected, kind="stable")[: top_lens[row]]
        assert list(ids) == best.tolist()
        assert logprobs == pytest.approx(expected[best], abs=1e-5)
        order = np.argsort(-expected, kind="stable").tolist()
        assert scores.chosen_ranks[row] == order.index(target) + 1


def test_equal_logits_are_listed_by_rising_id_and_the_first_is_the_top_one() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 3] = logits[1, 6] = 1.0
    scores = score(logits, [8, 8], [3, 3])
    assert [i for i, _ in scores.alternatives(0)] == [0, 1, 2]
    assert [i for i, _ in scores.alternatives(1)] == [3, 6, 0]
    assert score(logits, [8, 8], [1, 1]).top_ids.tolist() == [0, 3]


def test_a_rank_is_the_place_in_the_list_of_all_alternatives_also_among_equals() -> None:
    logits = torch.zeros(9, 9)
    logits[:, 3] = logits[:, 6] = 1.0
    scores = score(logits, list(range(9)), [9] * 9)
    listed = [token_id for token_id, _ in scores.alternatives(0)]
    assert scores.chosen_ranks.tolist() == [listed.index(token_id) + 1 for token_id in range(9)]


@pytest.mark.parametrize("vocab", [17, 301, 3072])
def test_a_rows_scores_are_the_same_bytes_alone_and_among_others(vocab: int) -> None:
    logits = make_logits(9, vocab)
    together = score(logits, list(range(9)), [2] * 9)
    alone = ScoreColumns.joined([score(logits[row : row + 1], [row], [2]) for row in range(9)])
    for name in ("chosen_logprobs", "chosen_ranks", "top_ids", "top_logprobs"):
        assert getattr(together, name).tobytes() == getattr(alone, name).tobytes()


def test_no_rows_have_no_scores() -> None:
    assert score(make_logits(0), [], []).num_tokens == 0
    assert ScoreColumns.joined([]).num_tokens == 0
