"""Which ids a row may be drawn from and how likely each is, in plain numpy, one rule after the other over all ids."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.logit_rules import LogitRules

Float64 = npt.NDArray[np.float64]


def plain_distribution(
    logits: Float64,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    barred_token_ids: tuple[int, ...] = (),
) -> Float64:
    """logits: [V]. [V] probabilities in the order of ids; those of ids that cannot come are 0."""
    scaled = logits.astype(np.float64)
    scaled[list(barred_token_ids)] = -np.inf
    probabilities = _normalised(np.exp((scaled - scaled.max()) / temperature))
    probabilities = _normalised(
        np.where(probabilities >= min_p * probabilities.max(), probabilities, 0.0)
    )
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    for i in order[len(order) if top_k is None else top_k :]:
        probabilities[i] = 0.0
    probabilities = _normalised(probabilities)
    mass_before = 0.0
    kept = probabilities.copy()
    for i in order:
        if top_p < 1.0 and mass_before >= top_p:
            kept[i] = 0.0
        mass_before += probabilities[i]
    return _normalised(kept)


def plain_logits(
    logits: npt.NDArray[np.float32], rules: LogitRules, prompt: Sequence[int], output: Sequence[int]
) -> npt.NDArray[np.float32]:
    """logits: [V]. [V] float32 under the rules, id after id."""
    biases = dict(zip(rules.biased_token_ids, rules.biases, strict=True))
    counts = Counter(output)
    changed = []
    for token_id, logit in enumerate(logits):
        if rules.allowed_token_ids is not None and token_id not in rules.allowed_token_ids:
            logit = np.float32(-np.inf)
        for *before, last in rules.bad_words:
            if last == token_id and list(output)[len(output) - len(before) :] == before:
                logit = np.float32(-np.inf)
        logit += np.float32(biases.get(token_id, 0.0))
        if token_id in prompt or token_id in counts:
            penalty = np.float32(rules.repetition_penalty)
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= np.float32(rules.frequency_penalty) * np.float32(counts[token_id])
        logit -= np.float32(rules.presence_penalty if counts[token_id] else 0.0)
        changed.append(logit)
    return np.array(changed, np.float32)


def plain_draw(distribution: Float64, logits: Float64, number: float) -> int:
    """The id at which the summed probability passes `number` in [0, 1), ids by falling logit, equal ones rising."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    possible = [i for i in order if distribution[i] > 0]
    total = 0.0
    for i in possible:
        total += distribution[i]
        if total > number:
            return i
    return possible[-1]


def _normalised(weights: Float64) -> Float64:
    return weights / weights.sum()
