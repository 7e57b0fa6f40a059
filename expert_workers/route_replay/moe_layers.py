"""The MoE layers of a Hugging Face transformers model, found by how they are made; transformers is not imported.

A layer is a module with a child `experts` and beside it the gate, called `gate` or `router` there. Since version 5 all
that transformers has for Qwen3-MoE, DeepSeek-V3, Mixtral and OLMoE have one contract: the gate returns (router_logits,
topk_weights, topk_ids), and the layer hands the last two to its experts. They differ in how logits become weights; the
gate's attributes tell how, and `GateOutput.weights` is compared with what the gate itself said, so that a gate of the
same looks and another formula is refused and not replayed wrongly.

Letters: N tokens, E experts, K experts per token, n some of the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from cluster.errors import RouteReplayError

GATE_NAMES = ("gate", "router")
_RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of the gate's own weights against the same formula, by the dtype that they are rounded to."""


@dataclass(frozen=True)
class WeightFormula:
    """How the weights of chosen experts follow from router logits.

    scores: softmax over all experts, or sigmoid; then, if `normalised`, shares of their sum; then times `scale`
    """

    scoring: Literal["softmax", "sigmoid"]
    normalised: bool
    scale: float

    def weigh(self, router_logits: Tensor, topk_ids: Tensor) -> Tensor:
        """[n, K] float32, differentiable in router_logits [n, E]; topk_ids [n, K] int64."""
        wide = router_logits.to(torch.float32)
        scores = wide.softmax(dim=-1) if self.scoring == "softmax" else wide.sigmoid()
        chosen = scores.gather(-1, topk_ids)
        if self.normalised:
            # as DeepSeek-V3; no change to any other sum, and no NaN where all of it is 0
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen * self.scale


@dataclass(frozen=True)
class MoeLayer:
    """name: in the model, as in its state dict. gate: the module whose output is recorded or replaced."""

    name: str
    gate: nn.Module
    num_experts: int
    num_experts_per_tok: int
    formula: WeightFormula

    def read(self, output: object) -> "GateOutput":
        """What the gate returned. Raises RouteReplayError unless it is (logits, weights, ids) of these sizes."""
        match output:
            case (Tensor() as logits, Tensor() as weights, Tensor() as ids):
                pass
            case _:
                refuse_gate(self.name, self.gate, "does not return (logits, weights, ids)")
        chosen = (logits.shape[0], self.num_experts_per_tok)
        if (
            tuple(logits.shape) != (chosen[0], self.num_experts)
            or tuple(weights.shape) != chosen
            or tuple(ids.shape) != chosen
            or ids.is_floating_point()
        ):
            shapes = ", ".join(str(list(part.shape)) for part in (logits, weights, ids))
            refuse_gate(
                self.name,
                self.gate,
                f"returns {shapes} instead of logits [tokens, {self.num_experts}] and weights and "
                f"ids [tokens, {self.num_experts_per_tok}]",
            )
        return GateOutput(logits, weights, ids)

    def check_formula(self, output: "GateOutput") -> None:
        """Raises RouteReplayError unless the formula gives the gate's own weights. Waits for the device."""
        expected = output.topk_weights.detach().to(torch.float32)
        formula = self.formula.weigh(output.router_logits.detach(), output.topk_ids.to(torch.int64))
        tolerance = _RELATIVE_TOLERANCE.get(output.topk_weights.dtype, 1e-4)
        if not torch.allclose(formula, expected, rtol=tolerance, atol=1e-6, equal_nan=True):
            difference = float((formula - expected).abs().max())
            refuse_gate(
                self.name,
                self.gate,
                f"weighs experts otherwise than by {self.formula} (difference {difference:.2e}): "
                f'replay with topk_weights="recorded"',
            )


@dataclass(frozen=True, eq=False)
class GateOutput:
    """router_logits: [N, E]; topk_weights: [N, K] as applied; topk_ids: [N, K] int64, in any order."""

    router_logits: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """In order of depth, which is the order of layers in routes.

    Raises RouteReplayError for a model without any, with one whose gate is not known, whose experts are spread over
    processes, or that is compiled.
    """
    layers = [_moe_layer(name, block, experts) for name, block, experts in _blocks(model)]
    if not layers:
        raise RouteReplayError(
            f"{type(model).__name__} has no MoE layer: no module with a child `experts` was found"
        )
    return layers


def refuse_gate(name: str, gate: object, why: str) -> NoReturn:
    raise RouteReplayError(
        f"{name}: the gate {type(gate).__name__} is not known: it {why}; supported: gates as "
        f"transformers 5 has for Qwen3-MoE, DeepSeek-V3, Mixtral and OLMoE"
    )


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise RouteReplayError(
                f"{name or type(model).__name__} is compiled by torch.compile, which passes by "
                f"hooks that come later; supported: the model before it was compiled"
            )
        experts = module._modules.get("experts")
        if experts is not None:
            yield name, module, experts


def _moe_layer(name: str, block: nn.Module, experts: nn.Module) -> MoeLayer:
    gates = [block._modules.get(gate_name) for gate_name in GATE_NAMES]
    gate = next((gate for gate in gates if gate is not None), None)
    if gate is None:
        refuse_gate(name, gate, f"is not a child named {' or '.join(GATE_NAMES)}")
    num_experts, top_k = getattr(gate, "num_experts", None), getattr(gate, "top_k", None)
    if not isinstance(num_experts, int) or not isinstance(top_k, int):
        refuse_gate(name, gate, "has no num_experts and top_k")
    if getattr(experts, "_is_expert_parallel", False):
        raise RouteReplayError(
            f"{name}: experts spread over processes are not supported; load the model without "
            f"expert parallelism, or shard it with FSDP"
        )
    formula = WeightFormula(
        scoring="sigmoid" if hasattr(gate, "e_score_correction_bias") else "softmax",
        normalised=bool(getattr(gate, "norm_topk_prob", True)),
        scale=float(getattr(gate, "routed_scaling_factor", 1.0)),
    )
    return MoeLayer(name, gate, num_experts, top_k, formula)
