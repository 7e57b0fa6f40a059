"""Bad models and bad flags: one line each, exit code 2, nothing started. docs/errors.md holds what is said to which."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from deploy.cli import main
from tests.deploy.bad_input import BAD_MODELS, FILES, nothing
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint

ERRORS_MD = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
ROW = re.compile(r"\| (?P<what>.+?) \| (?P<ticks>`+) ?(?P<line>.+?) ?(?P=ticks) \|")

Refusal = Callable[[list[str]], str]


def rows_under(heading: str) -> dict[str, str]:
    """The line that is answered, by what is wrong, of one section of the page."""
    section = (
        ERRORS_MD.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    )
    return {row["what"].strip("` "): row["line"] for row in ROW.finditer(section)}


MODEL_ROWS = rows_under("Models")
FLAG_ROWS = rows_under("Flags and settings")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command line that must be refused and returns its line."""

    def run(arguments: list[str]) -> str:
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code  # argparse's way
        output = capsys.readouterr()
        assert code == 2
        assert output.out == ""
        assert not ray.is_initialized()
        (line,) = output.err.splitlines()
        return line

    return run


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("good") / "model", seed=1)


@pytest.fixture(scope="module")
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def test_the_page_has_a_row_for_every_bad_model_and_every_file() -> None:
    assert set(MODEL_ROWS) == set(BAD_MODELS)
    assert set(FILES) <= set(FLAG_ROWS)


def test_every_row_of_the_page_is_read() -> None:
    rows = [line for line in ERRORS_MD.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    headers_and_rules = 2 * 2
    assert len(rows) == headers_and_rules + len(MODEL_ROWS) + len(FLAG_ROWS)


@pytest.mark.parametrize("command", ["serve --model", "check"])
@pytest.mark.parametrize("what", MODEL_ROWS)
def test_a_bad_model_is_refused_with_its_line(
    refusal: Refusal, good_model: Path, tmp_path: Path, what: str, command: str
) -> None:
    model = shutil.copytree(good_model, tmp_path / "model")
    BAD_MODELS[what](model)
    said = refusal([*command.split(), str(model)])
    assert_line(said.replace(str(model), "DIR"), MODEL_ROWS[what])


@pytest.mark.parametrize("arguments", FLAG_ROWS)
def test_a_bad_flag_is_refused_with_its_line(
    refusal: Refusal, tmp_path: Path, taken_port: str, arguments: str
) -> None:
    FILES.get(arguments, nothing)(tmp_path)
    filled_in = arguments.replace("DIR", str(tmp_path)).replace("PORT", taken_port)
    words = shlex.split(filled_in, comments=True)
    variables = dict(word.split("=", 1) for word in itertools.takewhile(is_variable, words))
    with environment(variables):
        said = refusal(words[len(variables) :])
    told = said.replace(str(tmp_path), "DIR").replace(f" {taken_port}", " PORT")
    told = told.replace(f":{taken_port}", ":PORT")
    assert_line(told, FLAG_ROWS[arguments])


def is_variable(word: str) -> bool:
    """As a shell takes it: before the command."""
    return re.match(r"[A-Z_]+=", word) is not None


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def assert_line(said: str, expected: str) -> None:
    """… stands for any text. argparse quotes choices or not, by Python's version."""
    parts = [re.escape(part) for part in expected.replace("'", "").split("…")]
    assert re.fullmatch("pointsman:? " + ".+".join(parts), said.replace("'", "")), said
