"""A cell that starts again replays what the one before it has computed, however that one ended."""

import multiprocessing
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.cells import START_SECONDS
from tests.helpers.http_cell import MODEL, CellClients, cell_clients
from tests.helpers.served import eventually
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint

BLOCK_SIZE = 16
FIRST = list(range(100, 100 + 5 * BLOCK_SIZE + 3))
SECOND = FIRST[: 2 * BLOCK_SIZE] + list(range(20, 20 + 2 * BLOCK_SIZE))
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("restarts") / "model", seed=3)


@contextmanager
def cell(model_dir: Path, state_dir: Path) -> Iterator[CellClients]:
    with cell_clients(model_dir, ep_size=1, deterministic=True, state_dir=state_dir) as clients:
        yield clients


@contextmanager
def killed_cell(model_dir: Path, state_dir: Path) -> Iterator[CellClients]:
    """One whose engine is a process of its own, with its HTTP server, and gets no time to end."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(model_dir, state_dir, there)
    )
    process.start()
    try:
        assert here.poll(START_SECONDS), "the cell does not serve"
        api, admin = here.recv()
        with httpx.Client(base_url=api) as of_api, httpx.Client(base_url=admin) as of_admin:
            yield CellClients(of_api, of_admin)
    finally:
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for rank in ranks:
            rank.kill()
        _, alive = psutil.wait_procs(ranks, START_SECONDS)
        process.join(START_SECONDS)
        assert not alive


def _serve(model_dir: Path, state_dir: Path, told: Any) -> None:
    with cell(model_dir, state_dir) as clients:
        told.send((str(clients.api.base_url), str(clients.admin.base_url)))
        signal.pause()


def ask(clients: CellClients, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "return_routed_experts": "weights",
    }
    answer = clients.api.post("/v1/completions", json=body, timeout=START_SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def replayed_tokens(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0
    return int(details["replayed_tokens"])


def gate_tokens(clients: CellClients) -> int:
    found = re.search(
        r"^pointsman_gate_tokens_total (\S+)$", clients.api.get("/metrics").text, re.M
    )
    assert found is not None
    return int(float(found[1]))


def state_of(clients: CellClients) -> dict[str, Any]:
    return dict(clients.admin.get("/admin/status").json()["state"])


def full(prompt: list[int]) -> int:
    return len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def test_the_first_request_after_a_restart_replays_routes_from_disk(
    model_dir: Path, tmp_path: Path
) -> None:
    with killed_cell(model_dir, tmp_path) as clients:
        first = ask(clients, FIRST)
        assert replayed_tokens(first) == 0
        eventually(lambda: state_of(clients)["waiting_bytes"] == 0, START_SECONDS, "a write")

    with cell(model_dir, tmp_path) as clients:
        again = ask(clients, FIRST)
        assert replayed_tokens(again) == full(FIRST)
        assert again["choices"] == first["choices"]
        assert gate_tokens(clients) == len(FIRST) - full(FIRST) + NEW_TOKENS - 1
        assert state_of(clients)["blocks_loaded"] == (len(FIRST) + NEW_TOKENS - 1) // BLOCK_SIZE
        second = ask(clients, SECOND)

    with cell(model_dir, tmp_path) as clients:
        for prompt, told in ((SECOND, second), (FIRST, first)):
            clients.admin.post("/admin/evict", json={"part": "kv"})
            answer = ask(clients, prompt)
            assert replayed_tokens(answer) == full(prompt)
            assert answer["choices"] == told["choices"]
