"""`pointsman bench store`: what a request asks of the prefix store, by the size of the store.

A prompt of 4,000 packed int32 tokens, of which 3,500 are in a full store: 218 blocks along a path of 12 nodes, with KV
on every rank. Its other 32 blocks are inserted with KV block ids and routes of the demo model's shape, and then with
scores; the store evicts the routes and scores of as many old blocks for them.

    match         at admission                                 ┐
    acquire       at admission                      ┐          │
    kv_block_ids  of the shared blocks, for its     │ insert   │ what a request asks of the index: the sum
                  block table                       │          │
    publish       when KV and routes are there      ┘          │
    record_scores of the same blocks                           ┘
    allocate      KV blocks for what the request computes, out of a full pool: evicts as many. A column of its own: the
                  scheduler asks for them from step to step, of whatever holds the KV
    release       after the answer
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError
from cluster.types import Rank
from deploy.bench.call_times import CallClock, CallTime
from deploy.bench.filled_store import (
    BLOCK_SIZE,
    LONG_EDGES,
    NAMESPACE,
    OWN_BLOCKS,
    PROMPT_TOKENS,
    SHAPE,
    SHARED_BLOCKS,
    SHORT_EDGES,
    FilledStore,
)
from deploy.bench.held_bytes import held_bytes

SIZES = (1_000, 10_000, 100_000, 1_000_000)
"""Blocks of stores with long edges, nodes of stores with short ones."""
BLOCKS_BY_NODES = {1_000: 2_400, 10_000: 21_000, 100_000: 180_000, 1_000_000: 1_700_000}
"""Of stores with short edges: so many blocks make about so many nodes. Small stores hold measured prompts in part, each
of which ends in one node of 32 blocks."""
_WARM_UPS = 10
_OTHER_TRAFFIC = 4
"""Blocks that come between two measured requests, for each of theirs, where edges are short."""


@dataclass(frozen=True)
class Sample:
    """One request's calls."""

    match: CallTime
    allocate: CallTime
    acquire: CallTime
    kv_block_ids: CallTime
    publish: CallTime
    record_scores: CallTime
    release: CallTime

    @property
    def insert(self) -> CallTime:
        return self.acquire + self.kv_block_ids + self.publish

    @property
    def match_insert(self) -> CallTime:
        return self.match + self.insert

    @property
    def match_insert_scores(self) -> CallTime:
        return self.match_insert + self.record_scores


_SUMS = ("match", "insert", "match_insert", "match_insert_scores")


@dataclass(frozen=True)
class StoreSize:
    """num_blocks: that the store is full with; filler_blocks: LONG_EDGES or SHORT_EDGES."""

    num_blocks: int
    filler_blocks: int

    @property
    def edges(self) -> str:
        return "long" if self.filler_blocks == LONG_EDGES else "short"

    @property
    def num_refilled(self) -> int:
        """Blocks of other traffic after each measured request. Among long edges theirs are like the others."""
        return 0 if self.filler_blocks == LONG_EDGES else _OTHER_TRAFFIC * OWN_BLOCKS


@dataclass(frozen=True)
class _Built:
    filled: FilledStore
    size: StoreSize
    build_cpu_seconds: float
    full_collection_seconds: float
    """CPU that Python's garbage collector takes to look at every object of this store."""


def run(ep_size: int, max_blocks: int, max_nodes: int, repeats: int) -> list[dict[str, Any]]:
    """A row per size, by blocks and then by nodes; they take turns, so that they share the machine's moods. Raises
    ConfigError for numbers that leave nothing to measure."""
    sizes = _sizes(ep_size, max_blocks, max_nodes)
    if ep_size < 1 or repeats < 1 or not sizes:
        raise ConfigError(
            f"--ep-size {ep_size}, --max-blocks {max_blocks}, --max-nodes {max_nodes} and --repeats {repeats}: at "
            f"least one rank, one repeat and a store of {SIZES[0]} blocks or nodes that has "
            f"{PROMPT_TOKENS // BLOCK_SIZE} blocks for each rank"
        )
    stores = [_build(size, ep_size) for size in sizes]
    gc.unfreeze()
    gc.collect()  # the next full one comes when it would in a process that has held these stores for long
    samples: list[list[Sample]] = [[] for _ in stores]
    clock = CallClock()
    with clock.watching():
        for number in range(-_WARM_UPS, repeats):
            for built, taken in zip(stores, samples, strict=True):
                sample = measure(built.filled, Rank(number % ep_size), clock)
                built.filled.refill(built.size.num_refilled)
                if number >= 0:
                    taken.append(sample)
    return [_row(built, taken) for built, taken in zip(stores, samples, strict=True)]


def measure(filled: FilledStore, rank: Rank, clock: CallClock) -> Sample:
    """One request of its own tail, from match to release."""
    store, prompt = filled.store, filled.prompt()
    first, end = SHARED_BLOCKS, SHARED_BLOCKS + OWN_BLOCKS
    routes, scores = filled.routes(first, end), filled.scores(first, end)
    match, match_time = clock.time(lambda: store.match(NAMESPACE, prompt))
    num_cached = match.num_kv_tokens[rank]
    lease, acquire = clock.time(lambda: store.acquire(NAMESPACE, prompt, num_cached))
    shared_ids, kv_block_ids = clock.time(lambda: store.kv_block_ids(lease, rank, num_cached))
    block_ids, allocate = clock.time(lambda: filled.take_blocks(rank))
    publication, publish = clock.time(
        lambda: store.publish(lease, rank, prompt, first, block_ids, routes)
    )
    num_recorded, record_scores = clock.time(
        lambda: store.record_scores(lease, first * BLOCK_SIZE, scores)
    )
    _, release = clock.time(lambda: store.release(lease))
    assert len(shared_ids) == SHARED_BLOCKS
    assert publication.outcomes == ("added",) * OWN_BLOCKS
    assert num_recorded == OWN_BLOCKS * BLOCK_SIZE
    return Sample(match_time, allocate, acquire, kv_block_ids, publish, record_scores, release)


def _sizes(ep_size: int, max_blocks: int, max_nodes: int) -> list[StoreSize]:
    needed = ep_size * PROMPT_TOKENS // BLOCK_SIZE
    by_blocks = [StoreSize(size, LONG_EDGES) for size in SIZES if size <= max_blocks]
    by_nodes = [
        StoreSize(BLOCKS_BY_NODES[size], SHORT_EDGES) for size in SIZES if size <= max_nodes
    ]
    return [size for size in by_blocks + by_nodes if size.num_blocks >= needed]


def _build(size: StoreSize, ep_size: int) -> _Built:
    """The stores before it are frozen, so that the collector looks at this one alone."""
    gc.collect()
    gc.freeze()
    started = time.process_time()
    filled = FilledStore(size.num_blocks, ep_size, size.filler_blocks)
    built = time.process_time()
    gc.collect()
    return _Built(filled, size, built - started, time.process_time() - built)


def _row(built: _Built, samples: Sequence[Sample]) -> dict[str, Any]:
    store, num_blocks = built.filled.store, built.size.num_blocks
    row: dict[str, Any] = {
        "edges": built.size.edges,
        "blocks": num_blocks,
        "nodes": store.stats().num_nodes,
        "repeats": len(samples),
    }
    for name in dict.fromkeys((*_SUMS, *(field.name for field in fields(Sample)))):
        row |= _percentiles(f"{name}_us", [getattr(sample, name).wall for sample in samples])
    sums = [sample.match_insert_scores for sample in samples]
    row |= _tails(sums)
    row["full_collection_ms"] = round(1000 * built.full_collection_seconds, 1)
    row["bytes_per_block"] = round(held_bytes(store) / num_blocks)
    row["route_bytes_per_block"] = BLOCK_SIZE * SHAPE.bytes_per_token
    row["build_cpu_seconds"] = round(built.build_cpu_seconds, 2)
    return row


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{p}": _percentile(values, p) for p in (50, 99)}


def _tails(sums: Sequence[CallTime]) -> dict[str, float]:
    """What the sum's p99 is made of: waiting for a core is in wall time alone, the collector also in CPU time."""
    return {
        "cpu_us_p50": _percentile([t.cpu for t in sums], 50),
        "cpu_us_p99": _percentile([t.cpu for t in sums], 99),
        "cpu_without_collector_us_p99": _percentile([t.cpu - t.garbage for t in sums], 99),
        "collector_us_max": round(max(t.garbage for t in sums), 1),
        "percent_with_collection": round(100 * float(np.mean([t.garbage > 0 for t in sums])), 1),
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    array: npt.NDArray[np.float64] = np.array(values, np.float64)
    return round(float(np.percentile(array, percent)), 1)
