"""Where experts live: logical expert -> physical copy -> rank. One immutable placement per epoch (EPLB's arrays)."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """One epoch's placement, the same for every MoE layer.

    physical_to_logical_map: [num_physical] int32. Physical copies are dealt to ranks in equal runs:
    rank r holds physical ids [r * P, (r + 1) * P) with P = num_physical / ep_size.
    """

    epoch: int
    ep_size: int
    num_experts: int
    physical_to_logical_map: Int32Array

    def __post_init__(self) -> None:
        if self.ep_size < 1:
            raise ConfigError(f"ep_size {self.ep_size} of a placement: at least 1 rank")
        num_physical = len(self.physical_to_logical_map)
        if num_physical % self.ep_size:
            raise ConfigError(
                f"{num_physical} physical experts do not divide by ep_size {self.ep_size}: "
                "choose a divisor of the number of experts"
            )
        present = np.unique(self.physical_to_logical_map)
        if not np.array_equal(present, np.arange(self.num_experts)):
            raise ConfigError(
                f"placement epoch {self.epoch} must hold each of {self.num_experts} logical experts "
                f"at least once and no other id, got {present.tolist()}"
            )

    @staticmethod
    def contiguous(num_experts: int, ep_size: int) -> "ExpertPlacement":
        """Epoch 0: expert e on rank e // (num_experts / ep_size), no redundant copies."""
        if ep_size < 1 or num_experts % ep_size:
            divisors = [d for d in range(1, num_experts + 1) if num_experts % d == 0]
            raise ConfigError(
                f"--ep-size {ep_size} does not divide the {num_experts} routed experts; "
                f"possible: {', '.join(map(str, divisors))}"
            )
        return ExpertPlacement(0, ep_size, num_experts, np.arange(num_experts, dtype=np.int32))

    @property
    def num_physical_per_rank(self) -> int:
        return len(self.physical_to_logical_map) // self.ep_size

    def local_experts(self, rank: int) -> Int32Array:
        """[P] logical ids that `rank` holds, in local index order."""
        per_rank = self.num_physical_per_rank
        return self.physical_to_logical_map[rank * per_rank : (rank + 1) * per_rank]

    @cached_property
    def replica_counts(self) -> Int32Array:
        """[num_experts] copies of each logical expert, at least one."""
        counts = np.bincount(self.physical_to_logical_map, minlength=self.num_experts)
        return counts.astype(np.int32)

    @cached_property
    def logical_to_physical_map(self) -> Int32Array:
        """[num_experts, most copies of one] physical ids of each logical expert's copies, ascending; −1 pads."""
        physical = np.argsort(self.physical_to_logical_map, kind="stable")
        experts = self.physical_to_logical_map[physical]
        firsts = self.replica_counts.cumsum() - self.replica_counts
        copies = np.full((self.num_experts, self.replica_counts.max()), -1, np.int32)
        copies[experts, np.arange(len(physical)) - firsts[experts]] = physical
        return copies

    @cached_property
    def position_period(self) -> int:
        """The same copies serve the same experts at positions that differ by a multiple of it; 1 without redundancy."""
        return math.lcm(*set(self.replica_counts.tolist()))

    def physical_ids(
        self, topk_ids: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int64]:
        """The copies that serve: copy (position + expert) mod copies of the expert, so that both neighbouring tokens
        and the experts of one token spread. Nothing else counts, above all not the token's home rank: a prefix that
        replays elsewhere meets the same copies, and its sums are grouped as they were.

        topk_ids: [T, ...] logical ids; positions: [T] of the tokens in their sequences. Returns [T, ...].
        """
        physical: npt.NDArray[np.int32]
        if self.position_period == 1:
            physical = self.logical_to_physical_map[:, 0][topk_ids]
        else:
            experts = topk_ids.astype(np.int64)
            by_token = positions.reshape(-1, *[1] * (experts.ndim - 1))
            copies = (by_token + experts) % self.replica_counts[experts]
            physical = self.logical_to_physical_map[experts, copies]
        return physical.astype(np.int64)
