"""Expert routes: which experts every token of a run of tokens chose, in every MoE layer, and with what weights.

Routes are logical expert ids, sorted by id within a token and layer, with the weights as the model applies them (after
renormalisation and scaling). Stored arrays hold no sentinel: validity is by range (vLLM and SGLang call the ids
`routed_experts`; the weights are ours).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_UINT8_EXPERTS = 256
FLOAT32: np.dtype[np.floating] = np.dtype(np.float32)


def expert_id_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """uint8 up to 256 experts, uint16 above."""
    return np.dtype(np.uint8 if num_experts <= MAX_UINT8_EXPERTS else np.uint16)


@dataclass(frozen=True)
class RouteShape:
    """What a route record of one model looks like. L = MoE layers, K = experts per token."""

    num_moe_layers: int
    num_experts_per_tok: int
    num_experts: int
    weight_dtype: np.dtype[np.floating] = FLOAT32

    @property
    def id_dtype(self) -> np.dtype[np.unsignedinteger]:
        return expert_id_dtype(self.num_experts)

    @property
    def bytes_per_token(self) -> int:
        per_choice = self.id_dtype.itemsize + self.weight_dtype.itemsize
        return self.num_moe_layers * self.num_experts_per_tok * per_choice


@dataclass(frozen=True, eq=False)
class ExpertRoutes:
    """Routes of T consecutive tokens.

    topk_ids:     [T, L, K] uint8 or uint16
    topk_weights: [T, L, K] the dtype the model applies them in
    """

    topk_ids: npt.NDArray[np.unsignedinteger]
    topk_weights: npt.NDArray[np.floating]

    def __post_init__(self) -> None:
        if self.topk_ids.shape != self.topk_weights.shape or self.topk_ids.ndim != 3:
            raise ValueError(
                f"routes need ids and weights of one shape [T, L, K], got {self.topk_ids.shape} "
                f"and {self.topk_weights.shape}"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.topk_ids.shape[0])

    @property
    def num_bytes(self) -> int:
        return self.topk_ids.nbytes + self.topk_weights.nbytes

    def slice(self, start: int, end: int) -> "ExpertRoutes":
        """Tokens [start, end) as views; valid as long as the arrays are not written."""
        return ExpertRoutes(self.topk_ids[start:end], self.topk_weights[start:end])

    def same_ids(self, other: "ExpertRoutes") -> bool:
        return np.array_equal(self.topk_ids, other.topk_ids)

    @staticmethod
    def empty(shape: RouteShape) -> "ExpertRoutes":
        dims = (0, shape.num_moe_layers, shape.num_experts_per_tok)
        return ExpertRoutes(np.zeros(dims, shape.id_dtype), np.zeros(dims, shape.weight_dtype))

    @staticmethod
    def concatenate(parts: list["ExpertRoutes"], shape: RouteShape) -> "ExpertRoutes":
        if not parts:
            return ExpertRoutes.empty(shape)
        if len(parts) == 1:
            return parts[0]
        return ExpertRoutes(
            np.concatenate([p.topk_ids for p in parts]),
            np.concatenate([p.topk_weights for p in parts]),
        )
