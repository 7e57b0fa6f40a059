"""`python -m loadtest`, as `make load` calls it, with a server of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.report import RESULTS_BEGIN, RESULTS_END, from_json
from tests.helpers.served import free_port


def load(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "loadtest", *arguments],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        timeout=250,
    )


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_a_server_of_its_own_fills_the_document(tmp_path: Path) -> None:
    document, results = tmp_path / "load.md", tmp_path / "load.json"
    document.write_text(f"{RESULTS_BEGIN}\n{RESULTS_END}\n")
    files = ["--out", str(document), "--json", str(results)]
    ended = load("--seconds", "3", "--users", "2", *files, "--", "--ep-size", "1")
    assert ended.returncode == 0, ended.stderr
    text = document.read_text()
    assert "| chat | ttft |" in text
    assert "(none leased), after evicting all 0." in text
    assert from_json(results.read_bytes()).num_failures == 0


def test_a_document_without_marks_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    document = tmp_path / "load.md"
    document.write_text("text\n")
    ended = load("--out", str(document))
    assert ended.returncode == 1
    assert ended.stderr.startswith("loadtest: no <!-- results -->")
    assert document.read_text() == "text\n"


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    results = tmp_path / "load.json"
    url = f"http://127.0.0.1:{free_port()}"
    ended = load("--host", url, "--json", str(results))
    assert ended.returncode == 1
    assert f"loadtest: {url}: " in ended.stderr
    assert not results.exists()
