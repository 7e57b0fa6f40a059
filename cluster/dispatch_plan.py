"""Dispatch plans: what a replayed run of tokens sends where, known before the step. Plain arrays; compiled elsewhere.

A *fragment* is the plan of one run of tokens on one source rank under one placement. It has a part for the source
(which tokens go to which rank) and one for every rank (what to do with the rows it gets). A step's plan is the join of
its fragments' parts, `expert_workers/step_plan.py`. Idea: DeepEP's cached handle, with the layout known ahead.

Letters: L MoE layers, W ranks, E experts of one rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

    receive: [W] parts, one per rank
    """

    source: Rank
    placement_epoch: int
    num_tokens: int
    send: SendPart
    receive: tuple[ReceivePart, ...]

    @property
    def num_bytes(self) -> int:
        """Of all parts together."""
        return self.send.num_bytes + sum(part.num_bytes for part in self.receive)
