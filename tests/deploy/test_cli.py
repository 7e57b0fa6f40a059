"""What `pointsman` answers before it starts anything: help, `check`, and one line with exit code 2 for bad input."""

import json
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.config import load_config
from deploy.cli import main
from deploy.json_output import check_writable
from deploy.planning import DEMO_MODEL, plan_cell
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


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_is_named_with_its_flag(refusal: Refusal, flag: str) -> None:
    other = {"--port": "--admin-port", "--admin-port": "--port"}[flag]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refusal("serve", flag, port, other, "0")
    assert f"{flag} {port}" in line
    assert "Address already in use" in line


def test_one_port_for_both_is_refused(refusal: Refusal) -> None:
    assert "must differ" in refusal("serve", "--port", "8123", "--admin-port", "8123")


def test_an_address_that_is_not_this_hosts_is_refused(refusal: Refusal) -> None:
    assert "203.0.113.7" in refusal("serve", "--host", "203.0.113.7", "--port", "0")


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff\xfe"])
def test_an_api_key_file_without_a_key_is_refused(
    refusal: Refusal, tmp_path: Path, content: str | bytes | None
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"--api-key-file {file}" in refusal("serve", "--api-key-file", str(file))


# --- models


def test_a_missing_model_directory_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    assert "nowhere" in refusal("serve", "--model", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"architectures": 3}'])
def test_a_broken_config_json_is_refused(refusal: Refusal, tmp_path: Path, text: str) -> None:
    model = Path(demo_copy(tmp_path))
    (model / "config.json").write_text(text)
    assert "config.json" in refusal("serve", "--model", str(model))


def test_an_unsupported_architecture_is_refused_by_name(refusal: Refusal, tmp_path: Path) -> None:
    model = demo_copy(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama")
    assert "LlamaForCausalLM" in refusal("serve", "--model", model)


def test_a_missing_tensor_is_refused_by_name(refusal: Refusal, tmp_path: Path) -> None:
    model = Path(demo_copy(tmp_path))
    _rename_tensor(model / "model.safetensors", b"model.norm.weight", b"model.mron.weight")
    assert "model.norm.weight" in refusal("serve", "--model", str(model))


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
    (model / "generation_config.json").write_text('{"typical_p": 0.9, "repetition_penalty": 1.1}')
    assert main(["check", str(model)]) == 0
    assert capsys.readouterr().err == (
        "pointsman: warning: generation_config.json: not applied: typical_p=0.9, repetition_penalty=1.1\n"
    )


def _rename_tensor(file: Path, old: bytes, new: bytes) -> None:
    """Same length, so that the header of a safetensors file stays in place."""
    assert len(old) == len(new)
    content = bytearray(file.read_bytes())
    (header_size,) = struct.unpack("<Q", content[:8])
    start = content.index(old, 8, 8 + header_size)
    content[start : start + len(old)] = new
    file.write_bytes(content)


# --- values


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (["--ep-size", "3"], ["3", "1, 2, 4, 8, 16, 32, 64"]),
        (["--ep-size", "-1"], ["ep_size", "-1"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--ep-size", "many"], ["--ep-size", "many"]),
        (["--ep", "2"], ["--ep"]),
        (["--max-model-len", "100000000"], ["--max-model-len", "100000000"]),
        (["--num-kv-blocks", "4", "--max-model-len", "100"], ["--max-model-len 100", "64"]),
        (["--kv-memory", "lots"], ["lots", "512MiB"]),
        (["--kv-memory", "1"], ["--kv-memory 1"]),
        (["--kv-memory", "512TiB", "--route-memory", "512TiB"], ["memory", "--kv-memory"]),
        (["--route-memory", "1MiB"], ["--route-memory 1MiB", "1048576"]),
        (["--exchange", "nccl"], ["--exchange nccl"]),
        (["--port", "70000"], ["http.port", "70000", "65535"]),
        (["--set", "cell.colour=red"], ["colour"]),
        (["--set", "colour.cell=red"], ["colour"]),
        (["--set", "nonsense"], ["nonsense", "section.key=value"]),
        (["--set", "cell.ep_size=many"], ["ep_size"]),
        (["--config", "/nowhere/pointsman.toml"], ["--config /nowhere/pointsman.toml"]),
    ],
)
def test_a_value_that_cannot_be_served_is_named(
    refusal: Refusal, arguments: list[str], needles: list[str]
) -> None:
    line = refusal("serve", *arguments)
    assert [needle for needle in needles if needle not in line] == []


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("[cell]\ncolour = 1", "colour"),
        ("[colour]\ncell = 1", "colour"),
        ("cell = 1", "cell"),
        ("[cell", "TOML"),
        ('[http]\nport = "high"', "port"),
    ],
)
def test_a_config_file_with_something_unknown_is_refused(
    refusal: Refusal, tmp_path: Path, text: str, needle: str
) -> None:
    file = tmp_path / "pointsman.toml"
    file.write_text(text)
    assert needle in refusal("serve", "--config", str(file))


def test_an_unknown_command_is_refused(refusal: Refusal) -> None:
    assert "serv" in refusal("serv")


# --- check


def test_check_tells_what_each_rank_would_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "check.json"
    file.write_text("older")
    assert main(["check", "--ep-size", "8", "--kv-memory", "16MiB", "--json", str(file)]) == 0
    described = json.loads(file.read_text())
    assert described["experts"] == 64
    assert described["experts_per_rank"] == 8
    assert described["kv_bytes_per_rank"] <= 16 * 2**20
    assert described["route_to_kv_ratio"] == round(
        described["route_bytes_per_token"] / described["kv_bytes_per_token"], 4
    )
    table = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert table == {name: str(value) for name, value in described.items()}


def test_check_tells_the_bytes_of_a_rank_s_weights() -> None:
    plans = {n: plan_cell(load_config(None, {"cell.ep_size": n})) for n in (1, 8)}
    replicated = plans[1].weight_bytes_per_rank - plans[1].expert_bytes_per_rank
    assert plans[1].weight_bytes_per_rank >= plans[1].checkpoint_bytes
    assert plans[8].expert_bytes_per_rank == plans[1].expert_bytes_per_rank // 8
    assert plans[8].weight_bytes_per_rank == replicated + plans[8].expert_bytes_per_rank


def test_check_takes_the_model_as_its_argument(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = demo_copy(tmp_path)
    assert main(["check", model]) == 0
    assert model in capsys.readouterr().out


def test_check_tells_of_a_model_with_grouped_query_attention(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_variant(tmp_path, SHAPE_VARIANTS["qwen3_as_many_kv_heads"], seed=1)
    assert main(["check", str(model)]) == 0
    table = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert table["architecture"] == "Qwen3MoeForCausalLM"
    assert (table["layers"], table["moe_layers"], table["experts"]) == ("3", "2", "16")
    assert table["kv_bytes_per_token"] == str(3 * 2 * 4 * 24 * 4)


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


def test_check_refuses_a_model_that_cannot_be_served(refusal: Refusal, tmp_path: Path) -> None:
    assert "Llama" in refusal("check", demo_copy(tmp_path, architectures=["LlamaForCausalLM"]))


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
