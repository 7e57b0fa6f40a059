"""Route replay for trainers: forward passes of a Hugging Face transformers model with recorded experts.

A rollout's tokens were sampled by a serving engine's experts. A trainer's own gate, a rounding or an update later,
chooses others for some tokens, and log-probs then differ by more than the policy does. Here every MoE layer takes the
recorded ones (rollout routing replay, R3: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv:2510.11370).

How: a forward hook on each gate replaces its output. The gate has run by then, so there are router logits to compute
weights from, with gradients, and to report as `router_logits`; what is replaced is what the experts receive. A hook and
not another `forward`, because hooks are what torch removes without a trace and what wrappers and checkpointing expect
(the gate lies inside the recomputed layer, so a recomputation passes through the same hook), and because no code of
transformers has to be known but the gate's contract (`moe_layers`). The hook comes first, so every other one on
the gate sees what is applied.

Letters: N tokens of the batch, R of them with routes, K experts per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from cluster.errors import RouteReplayError
from expert_workers.route_replay.batch import BatchLayout, BatchRoutes, place
from expert_workers.route_replay.moe_layers import GateOutput, MoeLayer, find_moe_layers
from expert_workers.route_replay.ranged_routes import RangedRoutes

WeightsFrom = Literal["recomputed", "recorded"]


@contextmanager
def replay_routes(
    model: nn.Module,
    layout: BatchLayout,
    routes: Sequence[RangedRoutes | None],
    *,
    topk_weights: WeightsFrom,
) -> Iterator[None]:
    """Inside, forward passes of `model` over the batch use the recorded experts; tokens without routes use the gate.

    routes: one per sequence of the layout, None for a sequence without
    topk_weights: "recomputed" from the current router logits of the recorded experts, so that gradients reach the gate;
        "recorded" as the serving engine applied them, constants

    One batch at a time, any number of passes over it. With gradient checkpointing backward() belongs inside too: it
    computes the layers again. Left, also by an exception, the model is as before.

    Raises RouteReplayError when model, layout and routes do not go together; from inside a forward pass when its batch
    is not the layout's or a gate turns out to be unknown; on leaving when a gate was never asked, because then nothing
    was replayed there; and from a backward() that would compute layers again after the end.
    """
    layers = find_moe_layers(model)
    batch = place(layout, routes)
    _check(layers, batch, topk_weights)
    hooks = [_ReplayHook(layer, number, batch, topk_weights) for number, layer in enumerate(layers)]
    guard = _RecomputationGuard()
    with ExitStack() as stack:
        stack.callback(guard.end)
        for hook in hooks:
            handle = hook.layer.gate.register_forward_hook(hook, prepend=True)
            stack.callback(handle.remove)
        for module in _checkpointing_modules(model):
            stack.callback(module.register_forward_hook(guard).remove)
        yield
    unused = [hook.layer.name for hook in hooks if not hook.was_called]
    if unused:
        raise RouteReplayError(
            f"nothing was replayed in {len(unused)} of {len(hooks)} MoE layers ({unused[0]}): no "
            f"forward pass of this {type(model).__name__} went through their gates"
        )


class _ReplayHook:
    """Of one layer's gate."""

    def __init__(
        self, layer: MoeLayer, number: int, batch: BatchRoutes, topk_weights: WeightsFrom
    ) -> None:
        self.layer = layer
        self.was_called = False
        self._number = number
        self._batch = batch
        self._topk_weights = topk_weights

    def __call__(self, _gate: nn.Module, _inputs: object, output: object) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            raise RouteReplayError("routes cannot be replayed in a pass that torch.compile traces")
        own = self.layer.read(output)
        if own.topk_ids.shape[0] != self._batch.num_tokens:
            raise RouteReplayError(
                f"a pass over {own.topk_ids.shape[0]} tokens inside the replay of a batch of "
                f"{self._batch.num_tokens} (padding included)"
            )
        if not self.was_called and self._topk_weights == "recomputed":
            self.layer.check_formula(own)
        self.was_called = True
        return self._replaced(own)

    def _replaced(self, own: GateOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Copied into the gate's own output also where nothing of it is left: the gate then has a gradient, of 0 if
        weights are recorded, and DDP waits for one of every parameter in every step.
        """
        device = own.topk_ids.device
        ids = self._batch.ids_of_layer(self._number).to(device)
        places = torch.from_numpy(self._batch.places).to(device)
        weights = self._weights(own, places, ids).to(device, own.topk_weights.dtype)
        ids = ids.to(own.topk_ids.dtype)
        return (
            own.router_logits,
            own.topk_weights.index_copy(0, places, weights),
            own.topk_ids.index_copy(0, places, ids),
        )

    def _weights(self, own: GateOutput, places: Tensor, ids: Tensor) -> Tensor:
        """[R, K] float32."""
        if self._topk_weights == "recorded":
            return self._batch.weights_of_layer(self._number)
        return self.layer.formula.weigh(own.router_logits[places], ids)


class _RecomputationGuard:
    """Hook of modules that compute their layers again in backward(): it must find the routes.

    A recomputation after the end would ask the gate and give gradients of other experts. The module's output is no part
    of what is recomputed, so its gradient arrives just before.
    """

    def __init__(self) -> None:
        self._ended = False

    def end(self) -> None:
        self._ended = True

    def __call__(self, module: nn.Module, _inputs: object, output: object) -> None:
        if torch.is_grad_enabled() and _recomputes(module):
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]  # torch's

    def _check(self, _gradient: Tensor) -> None:
        if self._ended:
            raise RouteReplayError(
                "backward() of a pass with gradient checkpointing after its replay has ended: it "
                "would compute layers again with other experts; call it before leaving the replay"
            )


def _check(layers: list[MoeLayer], batch: BatchRoutes, topk_weights: WeightsFrom) -> None:
    if topk_weights not in ("recomputed", "recorded"):
        raise RouteReplayError(
            f'topk_weights = {topk_weights!r}; supported: "recomputed", "recorded"'
        )
    if topk_weights == "recorded" and batch.topk_weights is None:
        raise RouteReplayError(
            'the routes have no weights: ask for them with return_routed_experts = "weights", or '
            'replay with topk_weights="recomputed"'
        )
    _, num_layers, num_experts_per_tok = batch.topk_ids.shape
    if num_layers != len(layers):
        raise RouteReplayError(f"routes of {num_layers} MoE layers for a model with {len(layers)}")
    for number, layer in enumerate(layers):
        if layer.num_experts_per_tok != num_experts_per_tok:
            raise RouteReplayError(
                f"{layer.name}: routes of {num_experts_per_tok} experts per token for a gate that "
                f"chooses {layer.num_experts_per_tok}"
            )
        highest = int(batch.topk_ids[:, number].max())
        if highest >= layer.num_experts:
            raise RouteReplayError(
                f"{layer.name}: expert id {highest}; supported: below {layer.num_experts}"
            )
        if any(isinstance(hook, _ReplayHook) for hook in layer.gate._forward_hooks.values()):
            raise RouteReplayError(f"{layer.name}: routes are being replayed here already")


def _checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if _may_recompute(module)]


def _may_recompute(module: nn.Module) -> bool:
    """By the flag of transformers, or as torch's CheckpointWrapper."""
    return bool(getattr(module, "gradient_checkpointing", False)) or _is_wrapper(module)


def _recomputes(module: nn.Module) -> bool:
    return _is_wrapper(module) or module.training


def _is_wrapper(module: nn.Module) -> bool:
    return "_checkpoint_wrapped_module" in module._modules


def _tensors(output: object) -> Iterator[Tensor]:
    match output:
        case Tensor():
            yield output
        case Mapping():
            for part in output.values():
                yield from _tensors(part)
        case tuple() | list():
            for part in output:
                yield from _tensors(part)
