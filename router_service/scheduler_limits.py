"""What bounds a schedule, in plain numbers."""

from dataclasses import dataclass

from cluster.config import SchedulerSection


@dataclass(frozen=True)
class SchedulerLimits:
    num_ranks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_waiting: int

    @staticmethod
    def from_config(
        section: SchedulerSection, *, num_ranks: int, block_size: int
    ) -> "SchedulerLimits":
        return SchedulerLimits(
            num_ranks,
            block_size,
            section.max_num_batched_tokens,
            section.max_num_seqs,
            section.max_num_waiting,
        )
