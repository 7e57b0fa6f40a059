"""`python -m tests.exchange_table`: what an exchange whose splits every rank knows costs over gloo, by the way it goes.

Rows of one MoE layer there and back, between forked ranks. The ways take turns within one run; a repeat counts with its
slowest rank. Under `chrt -r 5`, where that is allowed, other processes do not disturb it.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from expert_workers.ep_group import join_group
from expert_workers.exchange.base import RowSplits
from expert_workers.exchange.torch_group import TorchGroupExchange
from tests.helpers.ranks import RankContext, run_ranks

RANKS = (4, 8, 16)
PAIR_BYTES = (1024, 4096, 16384, 65536)
DENSITIES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the pairs of two ranks that have rows."""
REPEATS = 21
WARM_UP = 3
LAYERS = 4
"""Per repeat."""
SEED = 0

Way = Callable[[Tensor, RowSplits], Tensor]


@dataclass(frozen=True)
class Case:
    ep_size: int
    pair_bytes: int
    density: float

    def splits(self, rank: int) -> RowSplits:
        """One row per pair that has any; every rank also keeps one."""
        others = ~np.eye(self.ep_size, dtype=np.bool_)
        order = np.random.default_rng(SEED).permutation(np.flatnonzero(others))
        rows = np.eye(self.ep_size, dtype=np.int64)
        rows.flat[order[: round(self.density * len(order))]] = 1
        return RowSplits(tuple(rows[rank].tolist()), tuple(rows[:, rank].tolist()))


def seconds_by_way(case: Case, context: RankContext) -> dict[str, list[float]]:
    """Of one layer, repeat by repeat, on one rank."""
    group = join_group(context.group_options, context.store()).process_group
    batched = TorchGroupExchange(group, pairs_in_one_batch=True)
    exchange = TorchGroupExchange(group, pairs_in_one_batch=False)
    ways: dict[str, Way] = {
        "pairs": exchange.exchange_pairs,
        "pairs in one batch": batched.exchange_pairs,
        "all-to-all": exchange.exchange_rows,
    }
    splits = case.splits(context.rank)
    rows = torch.zeros(splits.num_sent, case.pair_bytes, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, way) in itertools.product(range(WARM_UP + REPEATS), ways.items()):
        dist.barrier(group)
        started = time.perf_counter()
        for _ in range(LAYERS):
            way(way(rows, splits), splits.reversed())
        seconds[name].append((time.perf_counter() - started) / LAYERS)
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def measure(case: Case) -> dict[str, int]:
    """Median µs per layer by way."""
    ranks = run_ranks(
        case.ep_size, lambda context: seconds_by_way(case, context), deadline_seconds=300.0
    )
    slowest = {name: np.max([rank[name] for rank in ranks], axis=0) for name in ranks[0]}
    return {name: round(1e6 * median(values.tolist())) for name, values in slowest.items()}


def main() -> None:
    print("| ranks | KB per pair | pairs with rows | pairs | pairs in one batch | all-to-all |")
    print("|---|---|---|---|---|---|")
    for ep_size, pair_bytes, density in itertools.product(RANKS, PAIR_BYTES, DENSITIES):
        micros = measure(Case(ep_size, pair_bytes, density))
        shape = f"| {ep_size} | {pair_bytes // 1024} | {density:.0%} |"
        print(shape, *(f"{value} |" for value in micros.values()), flush=True)


if __name__ == "__main__":
    main()
