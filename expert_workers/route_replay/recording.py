"""Routes of a forward pass of a Hugging Face transformers model, as the serving engine would return them.

Letters: N tokens of the batch, L MoE layers, K experts per token.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cluster.errors import RouteReplayError
from cluster.routes import expert_id_dtype
from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.moe_layers import MoeLayer, find_moe_layers
from expert_workers.route_replay.ranged_routes import RangedRoutes


class RouteRecording:
    """Owner of what the gates said in one forward pass. Their tensors stay on their devices until `routes`."""

    def __init__(self, model_name: str, layers: list[MoeLayer]) -> None:
        self._model_name = model_name
        self._layers = layers
        self._chosen: list[tuple[Tensor, Tensor] | None] = [None] * len(layers)
        self._in_pass = False
        self._complete = False

    def routes(self, layout: BatchLayout) -> list[RangedRoutes]:
        """One per sequence, of all its tokens from position 0, with weights. Copies to the host.

        Raises RouteReplayError without a complete pass, and when the pass had another number of tokens.
        """
        topk_ids, topk_weights = self._arrays()
        if len(topk_ids) != layout.num_tokens:
            raise RouteReplayError(
                f"a pass over {len(topk_ids)} tokens was recorded; the layout has "
                f"{layout.num_tokens} (padding included)"
            )
        return [
            RangedRoutes(topk_ids[s.start : s.stop], topk_weights[s.start : s.stop])
            for s in layout.sequences
        ]

    def _arrays(self) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.float32]]:
        """[N, L, K] each."""
        chosen = [part for part in self._chosen if part is not None]
        if not self._complete or len(chosen) < len(self._layers):
            raise RouteReplayError(
                f"no complete forward pass of this {self._model_name} was recorded "
                f"({len(chosen)} of {len(self._layers)} MoE layers)"
            )
        id_dtype = expert_id_dtype(max(layer.num_experts for layer in self._layers))
        return (
            np.stack([ids.cpu().numpy().astype(id_dtype) for ids, _ in chosen], axis=1),
            np.stack([weights.cpu().numpy() for _, weights in chosen], axis=1),
        )

    def begin_pass(self, *_: object) -> None:
        if self._complete:
            raise RouteReplayError("a second forward pass; supported: one per recording")
        self._in_pass = True

    def end_pass(self, *_: object) -> None:
        """The model returned. A pass that an exception ended can be made again."""
        self._in_pass = False
        self._complete = True

    def take(self, number: int, _gate: nn.Module, _inputs: object, output: object) -> None:
        """Of one layer. What is computed again in backward() is not taken."""
        if not self._in_pass:
            return
        own = self._layers[number].read(output)
        ids, order = own.topk_ids.detach().sort(dim=-1)
        weights = own.topk_weights.detach().gather(-1, order).to(torch.float32)
        self._chosen[number] = ids, weights


@contextmanager
def record_routes(model: nn.Module) -> Iterator[RouteRecording]:
    """Inside, one forward pass of `model` is recorded: called as `model(…)`, not through a part of it.

    What is recorded is what is applied: inside `replay_routes`, or around it, the replayed routes. Left, also by an
    exception, the model is as before. Raises RouteReplayError for a model whose gates are not known, and from a second
    pass.
    """
    layers = find_moe_layers(model)
    recording = RouteRecording(type(model).__name__, layers)
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            take = partial(recording.take, number)
            stack.callback(layer.gate.register_forward_hook(take).remove)
        stack.callback(model.register_forward_pre_hook(recording.begin_pass).remove)
        stack.callback(model.register_forward_hook(recording.end_pass).remove)
        yield recording
