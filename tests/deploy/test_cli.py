"""What `pointsman` answers before it starts anything: help, `check`, and one line with exit code 2 for bad input."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy.cli import main
from deploy.json_output import check_writable
from deploy.planning import DEMO_MODEL
from router_service.model_text import load_model_text
from tests.helpers.tiny_checkpoints import (
    SHAPE_VARIANTS,
    write_json,
    write_tiny_checkpoint,
    write_variant,
)

Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command line that must be refused and returns its line."""

    def run(*arguments: str) -> str:
        try:
            code = main(list(arguments))
        except SystemExit as error:
            code = error.code  # argparse's way
        output = capsys.readouterr()
        assert code == 2
        assert output.out == ""
        assert not ray.is_initialized()
        assert "starting" not in output.err
        (line,) = output.err.splitlines()
        assert line.startswith("pointsman")
        return line

    return run


def demo_copy(directory: Path, **changes: Any) -> str:
    """The demo model with other values in its config.json."""
    model = shutil.copytree(DEMO_MODEL, directory / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    return str(model)


# --- serve


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff\xfe"])
def test_an_api_key_file_without_a_key_is_refused(
    refusal: Refusal, tmp_path: Path, content: str | bytes | None
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"--api-key-file {file}" in refusal("serve", "--api-key-file", str(file))


# --- models


@pytest.mark.parametrize("command", ["serve", "check"])
@pytest.mark.parametrize(
    ("name", "content", "needle"),
    [
        ("tokenizer.json", None, "No such file"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "{", "JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "does not compile"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
        ("generation_config.json", "{", "JSON"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature = 'hot'"),
        ("generation_config.json", '{"top_p": 0}', "top_p = 0"),
    ],
)
def test_a_missing_or_wrong_text_file_is_named(
    refusal: Refusal,
    tmp_path: Path,
    command: str,
    name: str,
    content: str | bytes | None,
    needle: str,
) -> None:
    model = Path(demo_copy(tmp_path))
    file = model / name
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = ["serve", "--model", str(model)] if command == "serve" else ["check", str(model)]
    line = refusal(*arguments)
    assert str(file) in line
    assert needle in line


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_tokenizer_with_ids_beyond_the_model_is_refused_with_both_numbers(
    refusal: Refusal, tmp_path: Path, command: str
) -> None:
    model = write_tiny_checkpoint(tmp_path / "small", seed=1, vocab_size=2000)
    arguments = ["serve", "--model", str(model)] if command == "serve" else ["check", str(model)]
    line = refusal(*arguments)
    largest = load_model_text(DEMO_MODEL, 3072).codec.max_token_id
    assert f"tokenizer.json: has a token with id {largest}" in line
    assert "vocab_size is 2000" in line


def test_settings_of_the_generation_config_that_are_not_applied_are_one_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = Path(demo_copy(tmp_path))
    (model / "generation_config.json").write_text('{"typical_p": 0.9, "min_length": 7}')
    assert main(["check", str(model)]) == 0
    assert capsys.readouterr().err == (
        "pointsman: warning: generation_config.json: not applied: typical_p=0.9, min_length=7\n"
    )


# --- check


def test_check_takes_the_model_as_its_argument(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = demo_copy(tmp_path)
    assert main(["check", model]) == 0
    assert model in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"), [("use_sliding_window", True), ("num_key_value_heads", 3)]
)
def test_check_refuses_what_qwen3_moe_may_ask_for_and_is_not_computed(
    refusal: Refusal, tmp_path: Path, key: str, value: object
) -> None:
    model = write_variant(tmp_path, SHAPE_VARIANTS["qwen3"], seed=1)
    write_json(model / "config.json", SHAPE_VARIANTS["qwen3"] | {key: value})
    said = refusal("check", str(model))
    assert f"{model / 'config.json'}: {key} = {json.dumps(value)}; supported: " in said


@pytest.mark.parametrize("command", [["check"], ["bench", "control"], ["bench", "idle"]])
@pytest.mark.parametrize("file", ["/nowhere/out.json", "/"])
def test_a_json_file_that_cannot_be_written_is_refused_before_any_work(
    refusal: Refusal, command: list[str], file: str
) -> None:
    assert f"--json {file}" in refusal(*command, "--json", file)


def test_asking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    older, absent = tmp_path / "older.json", tmp_path / "absent.json"
    older.write_text("older")
    check_writable(older)
    check_writable(absent)
    assert older.read_text() == "older"
    assert not absent.exists()


# --- help


@pytest.mark.parametrize("command", [[], ["serve"], ["check"], ["bench"]])
def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120


def test_help_of_serve_tells_defaults_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "port to listen on, 0: any free one (default: 8000)" in text
    assert "KV pool of each rank (default: 64MiB)" in text
    assert "exit codes: 0 " in text
