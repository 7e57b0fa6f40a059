"""`python -m tests.route_replay_table`: how far a trainer's log-probs are from the server's, with and without replay.

A model is served in float32 on two ranks and samples completions; transformers scores them with the same weights, with
the same in bfloat16, and with gates that moved as by an update. For families that are not served here, a pass of
transformers in float32 stands for the server. Prints a table in Markdown.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from router_service.tokenizer import TextCodec
from tests.helpers.http_cell import http_cell
from tests.helpers.oracle import load_reference
from tests.helpers.rollouts import (
    Difference,
    Rollouts,
    difference,
    recorded_rollouts,
    sampled_rollouts,
)
from tests.helpers.states import random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR, SHAPE_VARIANTS, write_variant
from tests.helpers.trainers import perturb_gates, tiny_trainer

MAX_TOKENS = 64
SERVED = {"Qwen3-MoE, random": "qwen3", "DeepSeek-V3, random": "plain"}
ALONE = {"Mixtral, random": "mixtral", "OLMoE, random": "olmoe"}
TEXTS = (
    "In the beginning God created the heaven and the earth.",
    "Once upon a time there was a dragon who",
    "To be, or not to be, that is the question:",
    "What is expert parallelism?",
    "The history of the city begins with",
    "She opened the door and saw",
    "def main():",
    "It was the best of times, it was the worst of times,",
)


def moved(share: float) -> Callable[[Any], Any]:
    def move(model: Any) -> Any:
        perturb_gates(model, share=share)
        return model

    return move


TRAINERS: dict[str, Callable[[Any], Any]] = {
    "same weights": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "gates moved by 1 %": moved(0.01),
    "gates moved by 5 %": moved(0.05),
}


def served_models(directory: Path) -> Iterator[tuple[str, Any, Rollouts]]:
    """Name, the model in transformers, rollouts."""
    text_codec = TextCodec(DEMO_MODEL_DIR)
    texts = [text_codec.encode(text, add_special_tokens=True) for text in TEXTS]
    random_prompts = [random_prompt(32, seed=300 + number) for number in range(8)]
    yield "Minnow, trained (DeepSeek-V3)", *_served(DEMO_MODEL_DIR, texts)
    for name, variant in SERVED.items():
        model_dir = write_variant(directory / variant, SHAPE_VARIANTS[variant], seed=4)
        yield name, *_served(model_dir, random_prompts)
    for name, family in ALONE.items():
        model = tiny_trainer(family)
        sequences = [random_prompt(96, seed=400 + n, vocab_size=256) for n in range(8)]
        yield name, model, recorded_rollouts(model, sequences)


def _served(model_dir: Path, prompts: list[list[int]]) -> tuple[Any, Rollouts]:
    with http_cell(model_dir, ep_size=2) as client:
        return load_reference(model_dir), sampled_rollouts(client, prompts, MAX_TOKENS)


def row(model: str, trainer: str, own: Difference, *replayed: Difference) -> str:
    for one in replayed:
        assert one.other_experts == 0.0, "replay did not apply the recorded experts"
    cells = [model, trainer, f"{own.other_experts:.1%}"]
    cells += [f"{one.mean:.1e}" for one in (own, *replayed)]
    cells += [f"{one.largest:.1e}" for one in (own, *replayed)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    headings = ["model", "trainer", "other experts"]
    for kind in ("mean", "largest"):
        headings += [f"{kind}: own gate", "recomputed", "recorded"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    with TemporaryDirectory() as directory:
        for name, model, rollouts in served_models(Path(directory)):
            for trainer_name, change in TRAINERS.items():
                trainer = change(copy.deepcopy(model))
                differences = [
                    difference(trainer, rollouts, how) for how in (None, "recomputed", "recorded")
                ]
                print(row(name, trainer_name, *differences))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
