"""Which directories may take the place of the one that is served."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from cluster.namespace import model_fingerprint
from router_service.served_checkpoint import ServedCheckpoint
from tests.helpers.tiny_checkpoints import write_json, write_tiny_checkpoint

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedCheckpoint:
    """The directory itself is not needed any more."""
    model_dir = write_tiny_checkpoint(tmp_path_factory.mktemp("served"), seed=1)
    checkpoint = ServedCheckpoint(model_dir, read_model_spec(model_dir), "float32")
    for file in model_dir.iterdir():
        file.unlink()
    return checkpoint


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "other", seed=2)


def change(file: Path, **changes: Any) -> None:
    write_json(file, json.loads(file.read_text()) | changes)


def test_other_weights_of_the_same_model_are_named_by_their_fingerprint(
    served: ServedCheckpoint, other: Path
) -> None:
    assert served.inspect(other) == model_fingerprint(other, "float32")


@pytest.fixture
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collector")
def test_files_that_are_the_same_leave_no_compiled_template_to_a_garbage_collector(
    served: ServedCheckpoint, other: Path
) -> None:
    num_before = len(compiled_templates())
    served.inspect(other)
    assert len(compiled_templates()) == num_before


def compiled_templates() -> list[Template]:
    """Of this process; what other threads leave meanwhile does not count."""
    return [each for each in gc.get_objects() if type(each) is Template]


def test_what_a_trainer_did_not_write_stays_and_what_it_wrote_may_be_laid_out_anew(
    served: ServedCheckpoint, other: Path
) -> None:
    change(other / "tokenizer.json")
    change(other / "generation_config.json", transformers_version="5.0")
    served.inspect(other)
    for name in TEXT_FILES:
        (other / name).unlink()
    assert served.inspect(other) == model_fingerprint(other, "float32")


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("tokenizer.json", {"truncation": {"max_length": 5}}, "tokenizer.json: the tokenizer"),
        (
            "tokenizer_config.json",
            {"chat_template": "{{ messages }}"},
            "tokenizer_config.json: chat template or special tokens",
        ),
        (
            "generation_config.json",
            {"temperature": 0.5},
            "generation_config.json: the sampling defaults",
        ),
        (
            "generation_config.json",
            {"eos_token_id": 2},
            r"generation_config.json: eos_token_id is \(2,\)",
        ),
        ("config.json", {"num_experts_per_tok": 2}, r"gate.num_experts_per_tok is 2, .* is 4"),
    ],
)
def test_what_http_servers_keep_and_what_the_model_is_must_be_the_same(
    name: str, changes: dict[str, Any], named: str, served: ServedCheckpoint, other: Path
) -> None:
    change(other / name, **changes)
    with pytest.raises(CheckpointError, match=named):
        served.inspect(other)


@pytest.mark.parametrize("said", [2, None, [2, 0]])
def test_end_of_sequence_ids_that_a_directory_does_not_name_stay(
    said: int | list[int] | None, served: ServedCheckpoint, other: Path
) -> None:
    change(other / "config.json", eos_token_id=said)
    change(other / "generation_config.json", eos_token_id=None)
    fingerprint = model_fingerprint(other, "float32")
    assert served.inspect(other) == fingerprint
    (other / "generation_config.json").unlink()
    assert served.inspect(other) == fingerprint


def test_without_a_generation_config_the_end_of_sequence_id_of_the_config_must_be_the_same(
    served: ServedCheckpoint, other: Path
) -> None:
    (other / "generation_config.json").unlink()
    change(other / "config.json", eos_token_id=3)
    with pytest.raises(CheckpointError, match=r"/config.json: eos_token_id is \(3,\), .* \(2, 0\)"):
        served.inspect(other)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("models/next", "'models/next' is no absolute path"),
        ("/nowhere at all", "/nowhere at all is no directory"),
        ("/etc/hostname", "/etc/hostname is no directory"),
        ("/nul\0", "is no directory"),
        ("/" + "x" * 4000, "File name too long"),
    ],
)
def test_what_is_no_directory_is_refused(path: str, named: str, served: ServedCheckpoint) -> None:
    with pytest.raises(CheckpointError, match=named):
        served.inspect(Path(path))


def test_a_directory_without_weights_is_refused(served: ServedCheckpoint, other: Path) -> None:
    (other / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no .*safetensors file"):
        served.inspect(other)
