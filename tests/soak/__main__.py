"""`python -m tests.soak`: half an hour of everything on a small cell, and what grows meanwhile.

Requests of a trace, in all forms; clients that leave; a pool, budgets and caches that are too small; commands of an
operator, other weights among them; probes whose answers must not change. Every ten seconds processes and engine are
looked at. At the end the cell is idle and must hold nothing.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.served import Served
from tests.integration.api import CellApi
from tests.soak.asks import CONTEXT_TOKENS, MODEL, TENANTS
from tests.soak.other_weights import write_other_weights
from tests.soak.report import Run, lines_of
from tests.soak.sampling import RAY
from tests.soak.soak import Budgets, Cell, Options, Soak
from tests.soak.trace import TRACE_FILE
from tests.soak.verdict import MIN_SAMPLES

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
KV_BLOCKS = 96
"""Per rank."""
ROUTE_BYTES, SCORE_BYTES, PLAN_BYTES, STATE_BYTES = 2**20, 2**18, 2**20, 2**23
FLAGS = (
    *("--deterministic", "--http-servers", "2", "--served-model-name", MODEL),
    *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "256", "--num-kv-blocks", str(KV_BLOCKS)),
    *("--route-memory", str(ROUTE_BYTES), "--score-memory", str(SCORE_BYTES)),
    *("--set", f"store.plan_memory={PLAN_BYTES}B", "--set", "scheduler.max_num_waiting=40"),
)
"""What the trace asks for fits nowhere: blocks, routes, scores and plans are evicted all the time."""
MEMORY_LIMIT_MIB = 2.0
LIMITS = {"USS MiB": MEMORY_LIMIT_MIB, "RSS MiB": MEMORY_LIMIT_MIB} | dict.fromkeys(
    ("descriptors", "threads", "sockets", "series of metrics"), 0.5
)
"""Most that a series may rise in ten minutes, by how its name ends."""
ABOUT = (
    "EP {ep_size} on one host of {cores} cores (load average at the start {load:.1f}), demo model, deterministic "
    "numerics, two HTTP servers, a state directory, {tenants} tenants; {clients} clients send {trace}, {speed:g} times "
    "as fast as it was recorded, as far as they get answers; every fifth leaves early. {blocks} KV blocks per rank, "
    "1 MiB of routes, 256 KiB of scores, 1 MiB of plans, 4 running sequences per rank: so blocks, routes, scores "
    "and plans are evicted all the time."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing grows, no request failed, no probe changed and nothing is held at the end."""
    options = _parsed(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        run = _run(options, Path(directory))
    text = "\n".join(lines_of(run)) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    for problem in run.problems:
        print(f"soak: {problem}", file=sys.stderr)
    return 1 if run.problems else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up-minutes", type=float, help="(default: a third of the time)")
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--speed", type=float, default=3.0, help="of the trace")
    parser.add_argument("--sample-seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="(default: synthetic ones)")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="gets them, as JSON lines")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    if parsed.warm_up_minutes is None:
        parsed.warm_up_minutes = parsed.minutes / 3
    num_judged = 60 * (parsed.minutes - parsed.warm_up_minutes) / parsed.sample_seconds
    if num_judged < MIN_SAMPLES + 2:
        parser.error(f"{num_judged:.0f} samples after the warm-up are too few to judge")
    return parsed


def _run(options: argparse.Namespace, directory: Path) -> Run:
    cores, load = os.cpu_count(), os.getloadavg()[0]
    keys = {tenant: f"sk-of-{tenant}-00000000" for tenant in TENANTS}
    key_file = directory / "keys"
    key_file.touch(0o600)
    key_file.write_text("".join(f"{tenant} {key}\n" for tenant, key in keys.items()))
    flags = [*FLAGS, "--ep-size", str(options.ep_size), "--api-key-file", str(key_file)]
    flags += ["--state-dir", str(directory / "state"), "--state-size", str(STATE_BYTES)]
    with Served(*flags) as served:
        served.wait_until_ready(seconds=330.0)
        with CellApi(served.base_url, served.admin_url) as api:
            model_dirs = DEMO_MODEL, write_other_weights(DEMO_MODEL, directory / "other")
            budgets = _budgets(options.ep_size)
            cell = Cell(served, api, directory / "state", keys, model_dirs, budgets)
            soak = Soak(cell, _soak_options(options))
            found = soak.run(_limit_of)
        served.interrupt()
        code = served.wait(60.0)
        assert code == 0, f"serve ended with {code}"
        served.assert_nothing_left(60.0)
    trace = "synthetic rows" if options.traces is None else f"the trace {TRACE_FILE}"
    return Run(
        command=f"python -m tests.soak --minutes {options.minutes:g} --ep-size {options.ep_size}",
        about=ABOUT.format(
            **{"ep_size": options.ep_size, "cores": cores, "load": load, "tenants": len(TENANTS)},
            **{"clients": options.clients, "trace": trace, "blocks": KV_BLOCKS},
            speed=options.speed,
        ),
        samples=found.samples,
        trends=found.trends,
        warm_up_seconds=60 * options.warm_up_minutes,
        tally=soak.tally,
        done=soak.operator.done,
        probes=f"probes with the answer of the first time: {soak.prober.num_same}, with another one: "
        f"{len(soak.prober.different)}; of {soak.prober.num_weights} sets of weights",
        end=found.end,
        problems=found.problems,
    )


def _soak_options(options: argparse.Namespace) -> Options:
    return Options(
        seconds=60 * options.minutes,
        warm_up_seconds=60 * options.warm_up_minutes,
        num_clients=options.clients,
        speed=options.speed,
        sample_seconds=options.sample_seconds,
        seed=options.seed,
        traces=options.traces,
        samples_file=options.samples,
    )


def _limit_of(name: str) -> float | None:
    """Ray's own processes are its makers' to judge."""
    if name.startswith(RAY):
        return None
    return next((limit for end, limit in LIMITS.items() if name.endswith(end)), None)


def _budgets(ep_size: int) -> Budgets:
    most = {
        "engine: route bytes": ROUTE_BYTES,
        "engine: score bytes": SCORE_BYTES,
        "engine: plan bytes": PLAN_BYTES,
        "engine: KV blocks used": ep_size * KV_BLOCKS,
        "disk: state directory, MiB": STATE_BYTES / 2**20,
    }
    return Budgets(most, ep_size * KV_BLOCKS)


if __name__ == "__main__":
    sys.exit(main())
