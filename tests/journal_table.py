"""`python -m tests.journal_table DIR [BLOCKS]`: what keeping a store's routes and scores on disk costs.

Its publications with and without a journal, one snapshot of it, and the load of that. DIR is made, and removed.
"""

import gc
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cluster.prefix_match import StateOnDisk
from cluster.types import Rank
from deploy.actors.engine import GARBAGE_THRESHOLDS
from deploy.bench.call_times import CallClock
from deploy.bench.filled_store import (
    BLOCK_SIZE,
    LONG_EDGES,
    OWN_BLOCKS,
    SHAPE,
    SHORT_EDGES,
    FilledStore,
)
from deploy.bench.store import Sample, measure
from prefix_store.journal.directory import StateDirectory
from prefix_store.journal.journal import Journal
from prefix_store.journal.records import BlockSizes, Header
from prefix_store.journal.writer import WriterLimits
from prefix_store.store import PrefixStore

NUM_RANKS = 4
REPEATS = 200
MAX_BYTES = 2**36
SIZES = BlockSizes.of(BLOCK_SIZE, SHAPE)


def main() -> None:
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    directory = Path(sys.argv[1])
    num_blocks = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    print("| edges | blocks | what | |")
    print("| --- | --- | --- | --- |")
    for edges, filler in (("long", LONG_EDGES), ("short", SHORT_EDGES)):
        for name, value in measured(directory, num_blocks, filler).items():
            print(f"| {edges} | {num_blocks} | {name} | {value} |", flush=True)


def measured(directory: Path, num_blocks: int, filler: int) -> dict[str, str]:
    shutil.rmtree(directory, ignore_errors=True)
    plain = FilledStore(num_blocks, NUM_RANKS, filler)
    kept = FilledStore(num_blocks, NUM_RANKS, filler, journal_in(directory))
    values = {"nodes": str(kept.store.stats().num_nodes)}
    values |= snapshot(kept.store)
    values |= calls(plain, kept)
    kept.store.close(600.0)
    values |= load(directory, num_blocks)
    shutil.rmtree(directory)
    return values


def journal_in(directory: Path) -> Journal:
    header = Header.of("bench", "fast", BLOCK_SIZE, SHAPE)
    return Journal(StateDirectory(directory), header, SIZES, WriterLimits(MAX_BYTES, 1.0))


def calls(plain: FilledStore, kept: FilledStore) -> dict[str, str]:
    """Requests to both in turn; between them the journal has time to write, as between steps."""
    clock, samples = CallClock(), dict[str, list[Sample]](off=[], on=[])
    with clock.watching():
        for number in range(REPEATS):
            pair = [("off", plain), ("on", kept)]
            for name, filled in pair if number % 2 else reversed(pair):
                samples[name].append(measure(filled, Rank(number % NUM_RANKS), clock))
            settle(kept.store)
    values = {}
    for call in ("publish", "record_scores"):
        medians = [np.median([getattr(s, call).cpu for s in samples[n]]) for n in ("off", "on")]
        off, on = map(float, medians)
        values[f"{call} of {OWN_BLOCKS} blocks, off / on, µs"] = f"{off:.1f} / {on:.1f}"
    idle = [timed(kept.store.upkeep) for _ in range(1000)]
    values["upkeep with nothing to do, µs"] = f"{1e6 * float(np.median(idle)):.1f}"
    return values


def snapshot(store: PrefixStore) -> dict[str, str]:
    """Of everything: it was published faster than it could be written, so that a snapshot is owed."""
    deadline = time.monotonic() + 600.0
    while waiting := state_of(store).waiting_bytes:
        assert time.monotonic() < deadline, f"{waiting} bytes are not written after 600 s"
        time.sleep(0.01)
    slices, started = list[float](), time.perf_counter()
    while True:
        began = time.perf_counter()
        seconds = store.upkeep()
        slices.append(time.perf_counter() - began)
        if seconds is None:
            break
        time.sleep(seconds)
    total = time.perf_counter() - started
    assert state_of(store).snapshots == 1
    return {
        "snapshot, s": f"{total:.2f}",
        "of it the engine's, in slices, s": f"{sum(slices):.2f}",
        "slices, p50 / p99 / max, ms": " / ".join(
            f"{1e3 * float(np.percentile(slices, p)):.2f}" for p in (50, 99, 100)
        ),
    }


def state_of(store: PrefixStore) -> StateOnDisk:
    state = store.stats().state
    assert state is not None
    return state


def load(directory: Path, num_blocks: int) -> dict[str, str]:
    num_bytes = sum(file.stat().st_size for file in directory.glob("*.state"))
    store = PrefixStore(
        num_ranks=NUM_RANKS,
        num_kv_blocks=num_blocks // NUM_RANKS,
        block_size=BLOCK_SIZE,
        route_shape=SHAPE,
        route_budget_bytes=num_blocks * SIZES.routes,
        score_budget_bytes=num_blocks * SIZES.scores,
        kv_bytes_per_block=0,
        journal=journal_in(directory),
    )
    seconds = timed(store.load)
    num_loaded = store.stats().route_bytes // SIZES.routes
    store.close(600.0)
    return {
        "files, MB": f"{num_bytes / 1e6:.0f}",
        "load, s": f"{seconds:.2f}",
        "load of 100,000 blocks, s": f"{1e5 * seconds / num_loaded:.2f}",
    }


def settle(store: PrefixStore) -> None:
    while (seconds := store.upkeep()) is not None:
        time.sleep(seconds)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
