"""`python -m tests.few_shot_table`: a few-shot evaluation sent all at once, with the prefix store and without it.

Every prompt is the same shots and a question of its own, scored with `echo`, `logprobs` and `max_tokens` 0 as
evaluations ask. Tells seconds, tokens computed by rank, and how far log-probs are from transformers'.
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers.oracle import load_reference
from tests.helpers.served import Served
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR
from tests.integration.api import CellApi, MetricValues, random_prompt

TOLERANCE = 1e-4
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Evaluation:
    """expected: of each prompt, transformers' log-probs of all tokens from the second on."""

    shots: list[int]
    questions: list[list[int]]
    num_listed: int
    expected: list[list[float]]


@dataclass(frozen=True)
class Row:
    """One way: seconds until the last answer, tokens by source over all ranks and on the busiest one."""

    name: str
    seconds: float
    computed: float
    replayed: float
    busiest: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.seconds:.1f} | {self.computed:,.0f} | {self.replayed:,.0f} | "
            f"{self.busiest:,.0f} | {self.largest_difference:.1e} |"
        )


HEAD = (
    "| | seconds | through the gate | replayed | busiest rank | largest difference |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every log-prob is transformers', else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.few_shot_table")
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--shots-tokens", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logprobs", type=int, default=1)
    options = parser.parse_args(arguments)
    shots = random_prompt(options.seed, options.shots_tokens)
    questions = [random_prompt(options.seed + 1 + n, 20) for n in range(options.requests)]
    asked = Evaluation(shots, questions, options.logprobs, expected_logprobs(shots, questions))
    with Served("--ep-size", str(options.ep_size)) as served:
        served.wait_until_ready(seconds=330.0)
        with CellApi(served.base_url, served.admin_url) as api:
            api.http.timeout = 900.0
            rows = []
            for name, store in (("prefix store", True), ("scored before", True), ("off", False)):
                api.features(prefix_store=store)
                rows.append(measured(name, api, asked))
        served.interrupt()
        served.wait(STOP_SECONDS)
    print("\n".join([HEAD, *map(str, rows)]))
    return int(any(row.largest_difference > TOLERANCE for row in rows))


def measured(name: str, api: CellApi, asked: Evaluation) -> Row:
    fields = {"echo": True, "logprobs": asked.num_listed}
    before, started = api.metrics(), time.monotonic()
    with ThreadPoolExecutor(len(asked.questions)) as threads:
        answers = list(
            threads.map(lambda q: api.complete([*asked.shots, *q], 0, **fields), asked.questions)
        )
    seconds = time.monotonic() - started
    rise = api.rise_since(before)
    return Row(
        name,
        seconds,
        tokens(rise, "computed"),
        tokens(rise, "replayed"),
        max(by_rank(rise).values(), default=0.0),
        max(
            difference(answer, logprobs)
            for answer, logprobs in zip(answers, asked.expected, strict=True)
        ),
    )


def tokens(rise: MetricValues, source: str) -> float:
    name = "pointsman_rank_tokens_total"
    return sum(v for (metric, labels), v in rise.items() if metric == name and labels[1] == source)


def by_rank(rise: MetricValues) -> dict[str, float]:
    """Computed or replayed."""
    told: dict[str, float] = {}
    for (metric, labels), value in rise.items():
        if metric == "pointsman_rank_tokens_total" and labels[1] != "cached":
            told[labels[0]] = told.get(labels[0], 0.0) + value
    return told


def difference(answer: Any, expected: list[float]) -> float:
    """The largest of one request's log-probs."""
    told = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    return max(abs(a - b) for a, b in zip(told, expected, strict=True))


@torch.no_grad()
def expected_logprobs(shots: list[int], questions: list[list[int]]) -> list[list[float]]:
    """transformers', the shots computed once."""
    model = load_reference(DEMO_MODEL_DIR)
    output = model(torch.tensor([shots]), use_cache=True)
    beginning, last = output.logits[0, :-1], output.logits[0, -1:]
    of_shots = chosen(beginning, shots[1:])
    told = []
    for question in questions:
        cache = copy.deepcopy(output.cache)
        logits = model(torch.tensor([question]), cache=cache, use_cache=True).logits[0, :-1]
        told.append([*of_shots, *chosen(torch.cat([last, logits]), question)])
    return told


def chosen(logits: torch.Tensor, token_ids: list[int]) -> list[float]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    found: list[float] = logprobs[torch.arange(len(token_ids)), token_ids].tolist()
    return found


if __name__ == "__main__":
    sys.exit(main())
