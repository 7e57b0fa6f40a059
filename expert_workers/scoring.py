"""Log-probs from logits: of given tokens with their ranks, and of the most likely ones. One float32 log-softmax per
row, nothing else.

Letters: S rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.scores import ScoreColumns


def score(logits: Tensor, token_ids: Sequence[int], top_lens: Sequence[int]) -> ScoreColumns:
    """logits: [S, V] float32; token_ids: the token whose log-prob is asked of each row; top_lens: how many of the most
    likely ones are listed, at least 1. Rows do not depend on each other. Waits for the device once."""
    if not len(token_ids):
        return ScoreColumns.empty()
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen_ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen = logprobs.gather(1, chosen_ids[:, None])
    tops = [_most_likely(row, count) for row, count in zip(logprobs, top_lens, strict=True)]
    numbers = torch.cat([_ranks(logprobs, chosen, chosen_ids[:, None]), *(ids for _, ids in tops)])
    ranks_and_ids = numbers.cpu().numpy().astype(np.int32)
    values = torch.cat([chosen[:, 0], *(row_values for row_values, _ in tops)]).cpu().numpy()
    return ScoreColumns(
        chosen_logprobs=values[: len(token_ids)],
        chosen_ranks=ranks_and_ids[: len(token_ids)],
        top_lens=np.array(top_lens, np.int32),
        top_ids=ranks_and_ids[len(token_ids) :],
        top_logprobs=values[len(token_ids) :],
    )


def _ranks(logprobs: Tensor, chosen: Tensor, chosen_ids: Tensor) -> Tensor:
    """logprobs: [S, V]; chosen, chosen_ids: [S, 1]. [S] int64, from 1: after all likelier ids and lower equals."""
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    before = (logprobs > chosen) | ((logprobs == chosen) & (ids < chosen_ids))
    return torch.count_nonzero(before, dim=1) + 1


def _most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logprobs: [V]. Values and ids of the `count` largest, equal ones by rising id."""
    if count == 1:  # the first of equal maxima
        place = torch.argmax(logprobs).reshape(1)
        return logprobs[place], place
    values, ids = torch.sort(logprobs, descending=True, stable=True)
    return values[:count], ids[:count]
