"""`python -m tests.clients.lm_eval_scores`: lm-eval's own client against a served cell, held against transformers.

lm-eval is not among the project's dependencies: --lm-eval names the command of an environment that has `lm-eval[api]`
and transformers. Nothing is downloaded: task, questions and tokenizer are local files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.helpers.equality import ReferenceModel
from tests.helpers.served import Served
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

TASK_DIR = Path(__file__).parent / "lm_eval_task"
TASK = "pointsman_choices"
TOLERANCE = 1e-3
NEAR_TIE = 1e-4
LM_EVAL_SECONDS = 900.0
START_SECONDS = 330.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Likelihood:
    """What lm-eval asked for and was told."""

    context: str
    continuation: str
    logprob: float
    is_greedy: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all agree, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.lm_eval_scores")
    parser.add_argument("--lm-eval", default="lm_eval", help="the command (default: lm_eval)")
    parser.add_argument("--ep-size", type=int, default=2)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="lm-eval-") as directory,
        Served("--ep-size", str(options.ep_size)) as served,
    ):
        served.wait_until_ready(START_SECONDS)
        run_lm_eval(options.lm_eval, served, Path(directory))
        told = list(likelihoods(Path(directory)))
        served.interrupt()
        served.wait(STOP_SECONDS)
    return report(told)


def run_lm_eval(command: str, served: Served, directory: Path) -> None:
    """Results and samples come to `directory`. Raises CalledProcessError, TimeoutExpired."""
    model_arguments = {
        "model": served.model,
        "base_url": f"{served.base_url}/v1/completions",
        "tokenizer": str(DEMO_MODEL_DIR),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "8",
        "max_retries": "1",
        "max_length": "4096",
    }
    subprocess.run(
        [
            *(command, "run", "--model", "local-completions", "--tasks", TASK),
            *("--model_args", ",".join(f"{k}={v}" for k, v in model_arguments.items())),
            *("--include_path", str(TASK_DIR), "--output_path", str(directory), "--log_samples"),
        ],
        cwd=TASK_DIR,
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(directory / "cache"),
        },
        timeout=LM_EVAL_SECONDS,
        check=True,
    )


def likelihoods(directory: Path) -> Iterator[Likelihood]:
    (file,) = directory.rglob(f"samples_{TASK}_*.jsonl")
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        asked = sample["arguments"].values()
        for pair, response in zip(asked, sample["resps"], strict=True):
            logprob, is_greedy = response[0]
            yield Likelihood(pair["arg_0"], pair["arg_1"], float(logprob), str(is_greedy) == "True")


def report(told: list[Likelihood]) -> int:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR, local_files_only=True)
    reference = ReferenceModel(DEMO_MODEL_DIR)
    largest, failures = 0.0, list[str]()
    for likelihood in told:
        token_ids = tokenizer(likelihood.context + likelihood.continuation).input_ids
        first = len(tokenizer(likelihood.context).input_ids)
        logits = reference.pass_of(token_ids).logits[first - 1 : -1]
        expected = Expected.of(torch.log_softmax(logits, dim=-1), token_ids[first:])
        difference = abs(expected.logprob - likelihood.logprob)
        largest = max(largest, difference)
        if difference > TOLERANCE or not expected.allows(likelihood.is_greedy):
            failures.append(f"{likelihood}: {expected}")
    num_greedy = sum(likelihood.is_greedy for likelihood in told)
    print(
        f"{len(told)} log-likelihoods, {num_greedy} greedy, largest difference {largest:.2e} "
        f"(bound {TOLERANCE}), {len(failures)} failures"
    )
    print("\n".join(failures))
    return int(bool(failures) or not told)


@dataclass(frozen=True)
class Expected:
    """transformers' word on one continuation.

    behind: by how much the most likely token is ahead of the continuation's, where that is most
    ahead: by how much the most likely token is ahead of the second one, where that is least
    """

    logprob: float
    behind: float
    ahead: float

    @staticmethod
    def of(logprobs: Tensor, token_ids: list[int]) -> "Expected":
        """logprobs: [T, V] where these T tokens stand."""
        chosen = logprobs[torch.arange(len(token_ids)), token_ids]
        best, second = logprobs.topk(2, dim=-1).values.unbind(dim=-1)
        behind, ahead = float((best - chosen).max()), float((best - second).min())
        return Expected(float(chosen.sum()), behind, ahead)

    def allows(self, is_greedy: bool) -> bool:
        """A near-tie may go either way."""
        if is_greedy:
            return self.behind < NEAR_TIE
        return self.behind > 0 or self.ahead < NEAR_TIE


if __name__ == "__main__":
    sys.exit(main())
