"""`pointsman bench store`: what a request asks of the prefix store, by the size of the store.

A prompt of 4,000 packed int32 tokens, of which 3,500 are in a full store: 218 blocks along a path of 12 nodes, with KV
on every rank. Its other 32 blocks are inserted with KV block ids and routes of the demo model's shape, and the store
evicts the routes of as many old blocks for them. *insert* is `acquire` and `publish`; `release` comes after the answer.
"""

import gc
import sys
import time
from dataclasses import dataclass, fields
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from cluster.errors import ConfigError
from cluster.types import Rank
from deploy.bench.filled_store import (
    BLOCK_SIZE,
    NAMESPACE,
    OWN_BLOCKS,
    PROMPT_TOKENS,
    SHAPE,
    SHARED_BLOCKS,
    FilledStore,
)

STORE_BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
_WARM_UPS = 10


@dataclass(frozen=True)
class Sample:
    """Microseconds of one request's calls."""

    match: float
    acquire: float
    publish: float
    release: float


@dataclass(frozen=True)
class _Built:
    filled: FilledStore
    num_blocks: int
    build_cpu_seconds: float


def run(ep_size: int, max_blocks: int, repeats: int) -> list[dict[str, Any]]:
    """A row per size; the sizes take turns, so that they share the machine's moods. Raises ConfigError for numbers
    that leave nothing to measure."""
    needed = ep_size * PROMPT_TOKENS // BLOCK_SIZE
    sizes = [size for size in STORE_BLOCKS if needed <= size <= max_blocks]
    if ep_size < 1 or repeats < 1 or not sizes:
        raise ConfigError(
            f"--ep-size {ep_size}, --max-blocks {max_blocks} and --repeats {repeats}: at least one rank, one "
            f"repeat and a store of {STORE_BLOCKS[0]} blocks with {PROMPT_TOKENS // BLOCK_SIZE} for each rank"
        )
    stores = [_build(size, ep_size) for size in sizes]
    samples: list[list[Sample]] = [[] for _ in stores]
    for number in range(-_WARM_UPS, repeats):
        for built, taken in zip(stores, samples, strict=True):
            sample = measure(built.filled, Rank(number % ep_size))
            if number >= 0:
                taken.append(sample)
    return [_row(built, taken) for built, taken in zip(stores, samples, strict=True)]


def measure(filled: FilledStore, rank: Rank) -> Sample:
    """One request of its own tail, from match to release."""
    store, prompt = filled.store, filled.prompt()
    block_ids = filled.take_blocks(rank)
    routes = filled.routes(SHARED_BLOCKS, SHARED_BLOCKS + OWN_BLOCKS)
    times = [time.perf_counter_ns()]
    match = store.match(NAMESPACE, prompt)
    times.append(time.perf_counter_ns())
    lease = store.acquire(NAMESPACE, prompt, match.num_kv_tokens[rank])
    times.append(time.perf_counter_ns())
    publication = store.publish(lease, rank, prompt, SHARED_BLOCKS, block_ids, routes)
    times.append(time.perf_counter_ns())
    store.release(lease)
    times.append(time.perf_counter_ns())
    assert match.num_kv_tokens[rank] == SHARED_BLOCKS * BLOCK_SIZE
    assert publication.outcomes == ("added",) * OWN_BLOCKS
    return Sample(*(float(us) for us in np.diff(times) / 1000))


def _build(num_blocks: int, ep_size: int) -> _Built:
    started = time.process_time()
    filled = FilledStore(num_blocks, ep_size)
    return _Built(filled, num_blocks, time.process_time() - started)


def _row(built: _Built, samples: list[Sample]) -> dict[str, Any]:
    parts = {f.name: np.array([getattr(s, f.name) for s in samples]) for f in fields(Sample)}
    insert = parts["acquire"] + parts["publish"]
    times = {"match": parts["match"], "insert": insert, "match_insert": parts["match"] + insert}
    row: dict[str, Any] = {
        "blocks": built.num_blocks,
        "nodes": built.filled.store.stats().num_nodes,
        "repeats": len(samples),
    }
    for name, values in (times | parts).items():
        row[f"{name}_us_p50"] = round(float(np.percentile(values, 50)), 1)
        row[f"{name}_us_p99"] = round(float(np.percentile(values, 99)), 1)
    row["bytes_per_block"] = round(held_bytes(built.filled.store) / built.num_blocks)
    row["route_bytes_per_block"] = BLOCK_SIZE * SHAPE.bytes_per_token
    row["build_cpu_seconds"] = round(built.build_cpu_seconds, 2)
    return row


def held_bytes(root: object) -> int:
    """Bytes of every object that is reachable from this one, as Python counts them; code does not count."""
    total, seen, stack = 0, {id(root)}, [root]
    while stack:
        item = stack.pop()
        total += sys.getsizeof(item)
        for other in gc.get_referents(item):
            if id(other) not in seen and not isinstance(other, (type, FunctionType, ModuleType)):
                seen.add(id(other))
                stack.append(other)
    return total
