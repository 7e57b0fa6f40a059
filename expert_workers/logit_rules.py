"""A row's logits under its request's rules, as vLLM orders and means them: ids taken out, biases, penalties.

A function of the rules and of the tokens before the row's alone.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.logit_rules import LogitRules

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PastTokens:
    """Of the sequence before the sampled token. prompt: [any] int32, empty where no rule reads it; output: [any]."""

    prompt: Int32Array
    output: Int32Array


NO_PAST = PastTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))


def apply_rules(logits: Tensor, rules: LogitRules, past: PastTokens) -> Tensor:
    """logits: [V] float32, which stay as they are. The same under the rules; −inf where an id cannot come."""
    changed = _without(logits, rules, past)
    if rules.biased_token_ids:
        ids = torch.tensor(rules.biased_token_ids, device=logits.device)
        changed.index_add_(0, ids, changed.new_tensor(rules.biases))
    if rules.repetition_penalty != 1.0:
        changed = _without_repetition(changed, rules.repetition_penalty, past)
    if rules.frequency_penalty or rules.presence_penalty:
        counts = _tensor(past.output, logits).bincount(minlength=len(logits)).to(logits.dtype)
        changed -= rules.frequency_penalty * counts
        changed -= rules.presence_penalty * (counts > 0).to(logits.dtype)
    return changed


def _without(logits: Tensor, rules: LogitRules, past: PastTokens) -> Tensor:
    """A tensor of its own: −inf for ids that are not allowed or would complete a bad word."""
    if rules.allowed_token_ids is None:
        kept = logits.clone()
    else:
        allowed = torch.tensor(rules.allowed_token_ids, device=logits.device)
        kept = torch.full_like(logits, -math.inf)
        kept[allowed] = logits[allowed]
    completing = [word[-1] for word in rules.bad_words if _ends_with(past.output, word[:-1])]
    if completing:
        kept[torch.tensor(completing, device=logits.device)] = -math.inf
    return kept


def _ends_with(output: Int32Array, ids: tuple[int, ...]) -> bool:
    return not ids or output[-len(ids) :].tolist() == list(ids)


def _without_repetition(logits: Tensor, penalty: float, past: PastTokens) -> Tensor:
    """Keskar et al. 2019 (CTRL), for logits of either sign as in transformers."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[_tensor(past.prompt, logits)] = True
    seen[_tensor(past.output, logits)] = True
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _tensor(token_ids: Int32Array, logits: Tensor) -> Tensor:
    return torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
