"""Routes + placement → plan fragment. Pure numpy, all layers at once; no sort of anything but the pairs.

The result is what negotiated dispatch would find out for the same tokens: the same rows, in the same order.

Letters: T tokens, L MoE layers, K experts per token, W ranks, E experts of one rank.
"""

import numpy as np
import numpy.typing as npt

from cluster.dispatch_plan import PlanFragment, ReceivePart, SendPart, fragment_digest
from cluster.errors import PlanError
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Rank

IntArray = npt.NDArray[np.int64]


def compile_fragment(
    routes: ExpertRoutes, source: Rank, placement: ExpertPlacement, *, first_position: int
) -> PlanFragment:
    """routes: [T, L, K] logical ids, T may be 0. first_position: of token 0 in its sequence.

    Raises PlanError for an id that the placement has no expert of.
    """
    _check_ids(routes, placement.num_experts)
    per_rank = placement.num_physical_per_rank
    positions = np.arange(first_position, first_position + routes.num_tokens)
    physical = placement.physical_ids(routes.topk_ids, positions)
    physical = physical.transpose(1, 0, 2)  # [L, T, K]
    order = np.argsort(physical, axis=2, kind="stable")
    physical = np.take_along_axis(physical, order, axis=2)
    weights = np.take_along_axis(routes.topk_weights.transpose(1, 0, 2), order, axis=2)
    ranks, experts = np.divmod(physical, per_rank)

    wanted = _wanted(ranks, placement.ep_size)
    rows = wanted.cumsum(axis=2) - 1  # [L, W, T] number of the token's row at each rank
    send = SendPart(
        tokens=np.nonzero(wanted)[2].astype(np.int32),
        counts=wanted.sum(axis=2, dtype=np.int32),
    )
    pairs = _Pairs(ranks, experts, rows, _numbers_in_row(ranks), weights)
    receive = tuple(
        pairs.part(Rank(rank), send.counts, per_rank) for rank in range(placement.ep_size)
    )
    first_position %= placement.position_period
    digest = fragment_digest(routes, source, placement.epoch, first_position)
    return PlanFragment(digest, source, placement.epoch, routes.num_tokens, send, receive)


def _check_ids(routes: ExpertRoutes, num_experts: int) -> None:
    largest = int(routes.topk_ids.max(initial=0))
    if largest >= num_experts:
        raise PlanError(
            f"routes of {routes.num_tokens} tokens name expert {largest}, the placement has experts 0 to "
            f"{num_experts - 1}: they were recorded with another model"
        )


def _wanted(ranks: IntArray, ep_size: int) -> npt.NDArray[np.bool_]:
    """ranks: [L, T, K]. Returns [L, W, T]: rank w holds at least one expert of token t."""
    num_layers, num_tokens, _ = ranks.shape
    wanted = np.zeros((num_layers, ep_size, num_tokens), np.bool_)
    layers, tokens = _axes(ranks)
    wanted[layers, ranks, tokens] = True
    return wanted


def _axes(array: IntArray) -> tuple[IntArray, IntArray]:
    """Layer and token numbers of [L, T, K], ready to broadcast: [L, 1, 1] and [1, T, 1]."""
    num_layers, num_tokens = array.shape[:2]
    return np.arange(num_layers)[:, None, None], np.arange(num_tokens)[None, :, None]


def _numbers_in_row(ranks: IntArray) -> IntArray:
    """ranks: [L, T, K], ascending along K. Returns each choice's number among those of the same rank."""
    slots = np.arange(ranks.shape[2])
    starts = np.zeros(ranks.shape, np.int64)
    starts[..., 1:] = np.where(ranks[..., 1:] != ranks[..., :-1], slots[1:], 0)
    numbers: IntArray = slots - np.maximum.accumulate(starts, axis=2)
    return numbers


class _Pairs:
    """All choices of a fragment, sorted by rank, layer, expert, row; cut into the ranks' parts."""

    def __init__(
        self,
        ranks: IntArray,
        experts: IntArray,
        rows: IntArray,
        numbers: IntArray,
        weights: npt.NDArray[np.floating],
    ) -> None:
        self._num_layers = ranks.shape[0]
        layers, tokens = _axes(ranks)
        row_of_pair = rows[layers, ranks, tokens]
        num_ranks, num_experts = int(rows.shape[1]), int(experts.max(initial=0)) + 1
        keys = (ranks * self._num_layers + layers) * num_experts + experts
        # stable, and tokens ascend within a layer: so do rows within an expert
        order = np.argsort(keys.ravel(), kind="stable")
        self._ranks = ranks.ravel()[order]
        self._layers = np.broadcast_to(layers, ranks.shape).ravel()[order]
        self._experts = experts.ravel()[order]
        self._rows = row_of_pair.ravel()[order].astype(np.int32)
        self._numbers = numbers.ravel()[order].astype(np.uint8)
        self._weights = weights.ravel()[order].astype(np.float32)
        self._begins = np.searchsorted(self._ranks, np.arange(num_ranks + 1))

    def part(self, rank: Rank, send_counts: npt.NDArray[np.int32], num_experts: int) -> ReceivePart:
        begin, end = self._begins[rank], self._begins[rank + 1]
        group = self._layers[begin:end] * num_experts + self._experts[begin:end]
        counts = np.bincount(group, minlength=self._num_layers * num_experts)
        return ReceivePart(
            num_rows=send_counts[:, rank].copy(),
            pair_counts=counts.reshape(self._num_layers, num_experts).astype(np.int32),
            pair_rows=self._rows[begin:end].copy(),
            pair_ranks=self._numbers[begin:end].copy(),
            pair_weights=self._weights[begin:end].copy(),
            destinations=np.packbits(send_counts > 0, axis=1),
        )
