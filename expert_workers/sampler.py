"""The next token from logits: greedy, or drawn with a random number that only the row's key decides.

A row's logits go, in vLLM's order, through its request's rules (`logit_rules`) and lose the ids that are barred, greedy
too; then, of the distribution at its temperature, go ids below min_p times the largest probability, all but the top_k
most likely, and those beyond the mass top_p of what is left. One is drawn from the rest.

A row's token depends on its logits, its parameters, the tokens before it and its key (seed, choice, position) and on
nothing else: not on its neighbours, not on how the prompt was cut into chunks, not on how often the step is issued.

Letters: S rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.logit_rules import NO_RULES, LogitRules
from expert_workers.logit_rules import NO_PAST, PastTokens, apply_rules

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RowSampling:
    """How one row is drawn. temperature 0 is greedy; 0 < top_p ≤ 1; seed: any int of 64 bits; top_k ≥ 1, None: of all
    ids; 0 ≤ min_p ≤ 1.

    position: of the sampled token in its sequence
    barred_token_ids: not sampled; distinct, in range and not the whole vocabulary
    past: the tokens before it that the rules look at
    grammar_ids: [V] True for ids that the rules' grammar lets come; None: without one
    """

    temperature: float
    top_p: float
    seed: int
    choice: int
    position: int
    top_k: int | None = None
    min_p: float = 0.0
    barred_token_ids: tuple[int, ...] = ()
    rules: LogitRules = NO_RULES
    past: PastTokens = NO_PAST
    grammar_ids: BoolArray | None = None


@dataclass(frozen=True)
class DrawnTokens:
    """token_ids: [S]; poisoned: [S], True where a logit is not finite and the token means nothing."""

    token_ids: list[int]
    poisoned: list[bool]


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> DrawnTokens:
    """logits: [S, V] float32, one row per entry of `rows`. Waits for the device once."""
    if not rows:
        return DrawnTokens([], [])
    poisoned = ~torch.isfinite(logits).all(dim=-1)
    logits = _without_barred(_under_rules(logits, rows), rows)
    token_ids = torch.argmax(logits, dim=-1)  # the first of equal maxima, so the lowest id
    for index, row in enumerate(rows):
        if row.temperature > 0:
            token_ids[index] = _draw(logits[index], row)
    drawn, flags = torch.stack((token_ids, poisoned.to(torch.int64))).tolist()
    return DrawnTokens(drawn, [bool(flag) for flag in flags])


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) from the key alone: Philox 4x64 (Salmon et al. 2011) with the seed as key."""
    generator = np.random.Philox(key=seed % 2**128, counter=[position, choice, 0, 0])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def _under_rules(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """logits: [S, V], which stay as they are. A copy with the rows changed that have rules, if any has."""
    ruled = [index for index, row in enumerate(rows) if row.rules != NO_RULES]
    if not ruled:
        return logits
    changed = logits.clone()
    for index in ruled:
        changed[index] = _row_under_rules(logits[index], rows[index])
    return changed


def _row_under_rules(logits: Tensor, row: RowSampling) -> Tensor:
    """logits: [V], which stay as they are."""
    changed = apply_rules(logits, row.rules, row.past)
    if row.grammar_ids is None:
        return changed
    allowed = torch.from_numpy(row.grammar_ids).to(logits.device)
    return changed.masked_fill_(~allowed, -math.inf)


def _without_barred(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """logits: [S, V], which stay as they are. The same with −inf where an id is barred."""
    places = [(index, i) for index, row in enumerate(rows) for i in row.barred_token_ids]
    if not places:
        return logits
    row_indices, ids = torch.tensor(places, device=logits.device).T
    return logits.index_put((row_indices, ids), logits.new_tensor(-math.inf))


def _draw(logits: Tensor, row: RowSampling) -> Tensor:
    """logits: [V]. One id, [] int64, by inverse CDF over the truncated distribution, in float64.

    Ids are ordered by falling probability, equal ones by rising id, so top_k keeps exactly k of them. For top_p the
    smallest set is kept whose mass reaches it: every id before which the mass is still below it.
    """
    wide = logits.to(torch.float64)
    ordered, ids = torch.sort((wide - wide.max()) / row.temperature, descending=True, stable=True)
    if row.min_p > 0:
        ordered = ordered.masked_fill(ordered < math.log(row.min_p), -math.inf)
    if row.top_k is not None:
        ordered[row.top_k :] = -math.inf
    shares = torch.softmax(ordered, dim=-1)
    mass = torch.cumsum(shares, dim=-1)
    kept = (shares > 0) & ((mass - shares < row.top_p) | (row.top_p >= 1.0))
    kept[0] = True  # also where a row holds NaN, whose draw is discarded
    last = kept.sum() - 1
    target = mass[last] * uniform(row.seed, row.choice, row.position)
    place = torch.searchsorted(mass, target.reshape(1), right=True)[0]
    return ids[torch.minimum(place, last)]
