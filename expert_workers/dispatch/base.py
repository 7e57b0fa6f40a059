"""The Dispatcher interface: who gets which rows. Implementations say how the sizes become known.

Letters: T tokens of this rank, R rows received, H hidden size, K experts per token.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class DispatchedTokens:
    """Rows for this rank's experts: one per source token that chose at least one of them.

    x:              [R, H] in source rank order, within a source in token order
    expert_ids:     [R, K] int64 local expert index, −1 where that choice lives on another rank
    expert_weights: [R, K] float32, the applied weight of each choice (0 where −1)
    handle:         what `combine` needs; opaque (idea: DeepEP)
    """

    x: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    handle: object


class Dispatcher(Protocol):
    """Every rank of the group calls dispatch and combine once per MoE layer, ranks without tokens with T = 0."""

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, positions: Tensor
    ) -> DispatchedTokens:
        """x: [T, H]; topk_ids: [T, K] int64 logical ids sorted within a token; topk_weights: [T, K] float32.

        positions: [T] int64 of the tokens in their sequences: by them the copy of an expert is chosen that serves.
        """
        ...

    def combine(self, y: Tensor, handle: object) -> Tensor:
        """y: [R, H], per received row the weighted sum over this rank's experts in expert order.

        Returns [T, H]: the sum over ranks in rank order (the same order for every neighbourhood, so that a token's
        result does not depend on what else the step holds).
        """
        ...
