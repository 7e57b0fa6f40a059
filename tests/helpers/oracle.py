"""Hugging Face transformers as the oracle: logits, routes and how close its decisions were.

Letters: T tokens, L MoE layers, K experts per token, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.routes import ExpertRoutes, expert_id_dtype


@dataclass(frozen=True, eq=False)
class Reference:
    """One teacher-forced pass over a token sequence.

    logits:  [T, V] float32, of every position
    routes:  [T, L, K], ids ascending within a token, weights as applied
    margins: [T, L] float32, the smaller of two gaps: between the last chosen and the first refused expert of the kept
             groups, and between the last kept and the first dropped group
    """

    logits: Tensor
    routes: ExpertRoutes
    margins: Tensor


def load_reference(model_dir: Path) -> Any:
    """The model in float32 with plain attention and a plain loop over experts."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    return model.eval()


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[T, V] float32."""
    return reference_pass(model, token_ids).logits


def reference_routes(model: Any, token_ids: list[int]) -> ExpertRoutes:
    """[T, L, K]."""
    return reference_pass(model, token_ids).routes


def reference_greedy(model: Any, prompt_token_ids: list[int], max_tokens: int) -> list[int]:
    """The greedy continuation, without stopping at any token."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt_token_ids]),
            attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    generated: list[int] = output[0, len(prompt_token_ids) :].tolist()
    return generated


def reference_pass(model: Any, token_ids: list[int]) -> Reference:
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []
    hooks = [
        gate.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        for gate in gates
    ]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    ids, order = torch.stack([ids for _, _, ids in outputs], dim=1).sort(dim=-1)
    weights = torch.stack([weights for _, weights, _ in outputs], dim=1).gather(-1, order)
    margins = [
        selection_margins(router_logits, gate)
        for (router_logits, _, _), gate in zip(outputs, gates, strict=True)
    ]
    id_dtype = expert_id_dtype(gates[0].num_experts)
    return Reference(
        logits=logits.to(torch.float32),
        routes=ExpertRoutes(ids.numpy().astype(id_dtype), weights.numpy().astype(np.float32)),
        margins=torch.stack(margins, dim=1),
    )


def selection_margins(router_logits: Tensor, gate: Any) -> Tensor:
    """[T] for one layer's router logits [T, experts]."""
    if not hasattr(gate, "e_score_correction_bias"):
        return _gap_after(router_logits.softmax(dim=-1, dtype=torch.float32), gate.top_k)
    return _grouped_margins(router_logits, gate)


def _gap_after(scores: Tensor, num_chosen: int) -> Tensor:
    """[T]: between the last chosen and the first refused of scores [T, n], infinite if all are chosen."""
    if num_chosen == scores.shape[1]:
        return torch.full(scores.shape[:1], float("inf"))
    ordered = scores.sort(dim=-1, descending=True).values
    return ordered[:, num_chosen - 1] - ordered[:, num_chosen]


def _grouped_margins(router_logits: Tensor, gate: Any) -> Tensor:
    """[T]. DeepSeek-V3: groups first, then the experts of those that are kept."""
    num_groups, kept_groups = gate.num_group, gate.topk_group
    scores = router_logits.sigmoid() + gate.e_score_correction_bias
    grouped = scores.view(scores.shape[0], num_groups, -1)
    groups, order = grouped.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True)
    kept = grouped.gather(1, order[:, :kept_groups, None].expand(-1, -1, grouped.shape[2]))
    return torch.minimum(_gap_after(groups, kept_groups), _gap_after(kept.flatten(1), gate.top_k))


@dataclass(frozen=True)
class RouteAgreement:
    """How far the expert sets of two passes agree.

    num_tokens: tokens before the first difference; everything after it may follow from it
    margin:     the reference's margin at the first difference, infinite without one
    """

    num_tokens: int
    margin: float


def compare_routes(routes: ExpertRoutes, reference: Reference) -> RouteAgreement:
    """Compares with the reference's decisions, token by token and within a token layer by layer."""
    differs = torch.from_numpy((routes.topk_ids != reference.routes.topk_ids).any(-1))
    if not differs.any():
        return RouteAgreement(routes.num_tokens, float("inf"))
    first = int(differs.flatten().nonzero()[0])
    margin = float(reference.margins.flatten()[first])
    return RouteAgreement(first // differs.shape[1], margin)
