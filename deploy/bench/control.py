"""`pointsman bench control`: what a decode step spends outside the workers' forward, and on what. Medians."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from cluster.config import Config
from deploy.bench.local_cell import LocalCell, WatchedStep, local_cell
from deploy.cell_plan import CellPlan
from deploy.planning import plan_cell

EP_SIZES = (1, 2, 4)
CONCURRENCIES = (1, 8, 16)
PROMPT_TOKENS = 200
OUTPUT_TOKENS = 150
WARM_UP_STEPS = 20

_PARTS: dict[str, Callable[[WatchedStep], float]] = {
    "schedule": lambda step: step.timeline.schedule,
    "build": lambda step: step.timeline.build,
    "transfer": lambda step: step.timeline.transfer(step.results),
    "update": lambda step: step.timeline.update,
}


def run(config: Config, ep_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A row per EP size and number of concurrent decodes."""
    rows = []
    for ep_size in ep_sizes:
        sized = replace(config, cell=replace(config.cell, ep_size=ep_size))
        plan = plan_cell(sized)
        with local_cell(sized, plan) as cell:
            rows += [_measure(cell, plan, concurrency) for concurrency in CONCURRENCIES]
    return rows


def _measure(cell: LocalCell, plan: CellPlan, concurrency: int) -> dict[str, Any]:
    cell.observer.steps.clear()
    for number in range(concurrency):
        prompt = [(7 * number + 3 * i) % plan.spec.vocab_size for i in range(PROMPT_TOKENS)]
        cell.submit(f"c{concurrency}-{number}", prompt, OUTPUT_TOKENS)
    cell.run()
    decodes = [
        step for step in cell.observer.steps if step.num_chunks == step.num_tokens == concurrency
    ][WARM_UP_STEPS:]
    row: dict[str, Any] = {
        "ep_size": plan.ep_size,
        "concurrency": concurrency,
        "repeats": len(decodes),
        "step_us_p50": _micros([step.timeline.total for step in decodes]),
        "forward_us_p50": _micros([max(r.timings.forward for r in s.results) for s in decodes]),
        "control_us_p50": _micros([step.timeline.control(step.results) for step in decodes]),
    }
    for part, seconds in _PARTS.items():
        row[f"{part}_us_p50"] = _micros([seconds(step) for step in decodes])
    return row


def _micros(seconds: Sequence[float]) -> float:
    return round(1e6 * median(seconds), 1)
