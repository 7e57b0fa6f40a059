"""Dispatch plans: what a replayed run of tokens sends where, known before the step. Plain arrays; compiled elsewhere.

A *fragment* is the plan of one run of tokens on one source rank under one placement. It has a part for the source
(which tokens go to which rank) and one for every rank (what to do with the rows it gets). A step's plan is the join of
its fragments' parts, `expert_workers/step_plan.py`. Idea: DeepEP's cached handle, with the layout known ahead.

Letters: L MoE layers, W ranks, E experts of one rank.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.routes import ExpertRoutes
from cluster.types import Rank

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SendPart:
    """For the source rank.

    tokens:  [n] int32, number of the token within the fragment: layer after layer, within a layer destination after
             destination, within a destination ascending
    counts:  [L, W] int32, rows to each rank (to the source itself too: those do not cross)
    """

    tokens: Int32Array
    counts: Int32Array

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.counts.nbytes


@dataclass(frozen=True, eq=False)
class ReceivePart:
    """For one destination rank. A *pair* is a row and one of this rank's experts that it visits.

    num_rows:     [L] int32, rows of the fragment that arrive here
    pair_counts:  [L, E] int32
    pair_rows:    [p] int32, the pair's row among the fragment's rows of the layer; layer after layer, within a layer
                  expert after expert, within an expert ascending
    pair_ranks:   [p] uint8, the pair's number among its row's pairs here, by ascending local expert
    pair_weights: [p] float32, as applied
    destinations: [L, W / 8 rounded up] uint8, `np.packbits` of the ranks to which the source sends rows, alike in every
                  part: by it all ranks know alike how many pairs of ranks a layer of a step has
    """

    num_rows: Int32Array
    pair_counts: Int32Array
    pair_rows: Int32Array
    pair_ranks: npt.NDArray[np.uint8]
    pair_weights: npt.NDArray[np.float32]
    destinations: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        pairs = self.pair_rows.nbytes + self.pair_ranks.nbytes + self.pair_weights.nbytes
        return self.num_rows.nbytes + self.pair_counts.nbytes + self.destinations.nbytes + pairs


@dataclass(frozen=True, eq=False)
class PlanFragment:
    """The plan of `num_tokens` consecutive tokens whose home rank is `source`, under one placement epoch.

    digest: `fragment_digest` of what it was compiled from
    receive: [W] parts, one per rank
    """

    digest: bytes

    source: Rank
    placement_epoch: int
    num_tokens: int
    send: SendPart
    receive: tuple[ReceivePart, ...]

    @property
    def num_bytes(self) -> int:
        """Of all parts together."""
        return self.send.num_bytes + sum(part.num_bytes for part in self.receive)

    @property
    def parts_agree(self) -> bool:
        """Each rank expects the rows that the source sends it, and all know alike which ranks get any."""
        rows = [part.num_rows for part in self.receive]
        destinations = np.packbits(self.send.counts > 0, axis=1)
        return np.array_equal(np.stack(rows, axis=1), self.send.counts) and all(
            np.array_equal(part.destinations, destinations) for part in self.receive
        )


def fragment_digest(
    routes: ExpertRoutes, source: Rank, placement_epoch: int, first_position: int
) -> bytes:
    """[16] bytes that name a fragment by all that it is compiled from.

    first_position: of token 0 in its sequence, modulo the placement's `position_period`
    """
    digest = hashlib.blake2b(digest_size=16)
    numbers = source, placement_epoch, first_position, routes.num_tokens
    digest.update(repr(tuple(map(int, numbers))).encode())
    digest.update(routes.topk_ids.tobytes())
    digest.update(routes.topk_weights.tobytes())
    return digest.digest()
