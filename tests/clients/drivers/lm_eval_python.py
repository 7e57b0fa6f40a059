"""lm-eval with its local-completions client: its log-likelihoods are transformers', its texts those of plain HTTP.

Tasks, questions and tokenizer are local files.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checking import CheckFailed, Json, LeftOut, Server, run_checks, same, some
from commands import run_command
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = Path(__file__).parents[1] / "lm_eval_task"
NUM_CONCURRENT = 8
TOLERANCE = 1e-3
NEAR_TIE = 1e-4


def samples_of(server: Server, task: str) -> list[Json]:
    """What lm-eval asked for and was told, question by question."""
    arguments = {
        "model": server.model,
        "base_url": f"{server.base_url}/completions",
        "tokenizer": server.tokenizer_dir,
        "tokenizer_backend": "huggingface",
        "num_concurrent": NUM_CONCURRENT,
        "max_retries": 1,
        "max_length": 4096,
    }
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as directory:
        told = ",".join(f"{name}={value}" for name, value in arguments.items())
        run_command(
            "lm_eval",
            [
                *("run", "--model", "local-completions", "--model_args", told),
                *("--tasks", task, "--include_path", str(TASKS)),
                *("--output_path", directory, "--log_samples"),
            ],
            Path(directory),
            runs_in=TASKS,
            variables={"OPENAI_API_KEY": server.api_key, "HF_DATASETS_OFFLINE": "1"},
        )
        (file,) = Path(directory).rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]


class Reference:
    """transformers on the same checkpoint, in float32."""

    def __init__(self, model_dir: Path) -> None:
        if not list(model_dir.glob("*.safetensors")):
            raise LeftOut(f"no weights in {model_dir} to compare with")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def scores(self, token_ids: list[int], first: int) -> "Scores":
        """Of the tokens from `first` on, each after all before it."""
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return Scores.of(torch.log_softmax(logits[first - 1 : -1], dim=-1), token_ids[first:])


@dataclass(frozen=True)
class Scores:
    """behind: by how much the most likely token is ahead of the one that stands there, where that is most
    ahead: by how much the most likely token is ahead of the second one, where that is least
    """

    logprob: float
    behind: float
    ahead: float

    @staticmethod
    def of(logprobs: Tensor, token_ids: list[int]) -> "Scores":
        """logprobs: [T, V] where these T tokens stand."""
        chosen = logprobs[torch.arange(len(token_ids)), token_ids]
        best, second = logprobs.topk(2, dim=-1).values.unbind(dim=-1)
        behind, ahead = float((best - chosen).max()), float((best - second).min())
        return Scores(float(chosen.sum()), behind, ahead)

    def allow_greedy(self, is_greedy: bool) -> bool:
        """A near-tie may go either way."""
        if is_greedy:
            return self.behind < NEAR_TIE
        return self.behind > 0 or self.ahead < NEAR_TIE


def choices(server: Server) -> None:
    """The shots that all questions share are computed once per rank at most."""
    reference = Reference(server.tokenizer_dir)
    before = server.token_counts()
    samples = samples_of(server, "pointsman_choices")
    counted = server.token_counts() - before
    same(counted.prompt > 2 * counted.computed, True, f"that most of {counted} is cached")
    largest = 0.0
    for context, continuation, logprob, is_greedy in _likelihoods(samples):
        token_ids = reference.tokenizer(context + continuation).input_ids
        scores = reference.scores(token_ids, len(reference.tokenizer(context).input_ids))
        largest = max(largest, within_tolerance(logprob, scores.logprob, continuation))
        same(scores.allow_greedy(is_greedy), True, f"is_greedy {is_greedy} beside {scores}")
    print(f"largest difference {largest:.1e}")


def _likelihoods(samples: list[Json]) -> Iterator[tuple[str, str, float, bool]]:
    some(samples, "samples")
    for sample in samples:
        pairs = sample["arguments"].values()
        for pair, response in zip(pairs, sample["resps"], strict=True):
            logprob, is_greedy = response[0]
            yield pair["arg_0"], pair["arg_1"], float(logprob), str(is_greedy) == "True"


def within_tolerance(got: float, wanted: float, what: str) -> float:
    """The difference."""
    difference = abs(got - wanted)
    if not difference <= TOLERANCE:
        raise CheckFailed(f"the log-likelihood of {what!r} is {got} and should be {wanted}")
    return difference


def texts(server: Server) -> None:
    """Each scored as a whole, behind the token that begins a text."""
    reference = Reference(server.tokenizer_dir)
    samples = samples_of(server, "pointsman_text")
    some(samples, "samples")
    for sample in samples:
        text = sample["arguments"]["gen_args_0"]["arg_0"]
        token_ids = [reference.tokenizer.bos_token_id, *reference.tokenizer(text).input_ids]
        wanted = reference.scores(token_ids, 1).logprob
        within_tolerance(float(sample["resps"][0][0]), wanted, text)


def generated(server: Server) -> None:
    samples = samples_of(server, "pointsman_answers")
    some(samples, "samples")
    for sample in samples:
        asked = sample["arguments"]["gen_args_0"]
        status, answer = server.post(
            "/v1/completions",
            {
                "model": server.model,
                "prompt": asked["arg_0"],
                "stop": asked["arg_1"]["until"],
                "max_tokens": asked["arg_1"]["max_gen_toks"],
                "temperature": 0,
            },
        )
        same(status, 200, f"status of plain HTTP, which says {answer}")
        same(sample["resps"][0][0], answer["choices"][0]["text"], "the text")


CHECKS = [
    ("multiple choice: log-likelihoods and greedy flags", choices),
    ("whole texts: log-likelihoods", texts),
    ("generated answers", generated),
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
