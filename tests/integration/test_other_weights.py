"""`pointsman serve` gets other weights and its first ones back, under traffic, over two HTTP servers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.namespace import model_fingerprint, weight_version
from tests.helpers.served import Served, eventually
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint
from tests.integration.answers import EVERYTHING, Answer, answer_of
from tests.integration.api import CellApi, random_prompt, source_of

pytestmark = pytest.mark.ray
FLAGS = ("--ep-size", "2", "--deterministic", "--http-servers", "2")
PROMPT = random_prompt(71, 100)
ASKED: dict[str, Any] = EVERYTHING | {"model": "first", "logprobs": 2}
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of one shape. The name that is served is that of the directory."""
    directory = tmp_path_factory.mktemp("models")
    return (
        write_tiny_checkpoint(directory / "first", seed=1),
        write_tiny_checkpoint(directory / "second", seed=2),
    )


@pytest.fixture(scope="module")
def api(models: tuple[Path, Path]) -> Iterator[CellApi]:
    with Served("--model", str(models[0]), *FLAGS) as served:
        served.wait_until_ready()
        with CellApi(served.base_url, served.admin_url) as api:
            yield api
        served.interrupt()
        assert served.wait(30.0) == 0


def update(api: CellApi, model_dir: Path, running: str) -> httpx.Response:
    return httpx.post(
        f"{api.admin_url}/admin/weights",
        json={"model_dir": str(model_dir), "running": running},
        timeout=120.0,
    )


def said(api: CellApi) -> tuple[Answer, Any, str]:
    """Tokens, routes, log-probs, and whose weights made them."""
    answer = api.complete(PROMPT, NUM_TOKENS, **ASKED)
    return answer_of(answer), answer["choices"][0]["logprobs"], answer["weight_version"]


def test_a_served_cell_takes_other_weights_and_its_first_ones_back(
    api: CellApi, models: tuple[Path, Path]
) -> None:
    first, second = models
    versions = [weight_version(model_fingerprint(model, "float32")) for model in models]
    before = said(api)
    assert before[2] == api.status()["weight_version"] == versions[0]

    refused = update(api, second / "nowhere", "restart")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model_dir")
    assert said(api) == before

    with ThreadPoolExecutor(4) as pool:
        whole = [
            pool.submit(api.complete, random_prompt(72 + n, 40), 300, **ASKED) for n in range(2)
        ]
        generated = "generation_tokens_total"
        start = api.metric(generated)
        eventually(lambda: api.metric(generated) > start, 30.0, "a first token")
        told = update(api, second, "restart").json()
        assert (told["weight_version"], told["aborted"], told["restarted"]) == (versions[1], 0, 2)
        assert {answer.result()["weight_version"] for answer in whole} == {versions[1]}

    other = api.complete(PROMPT, NUM_TOKENS, **ASKED)
    assert source_of(other) == (0, 0)
    assert said(api) == (answer_of(other), other["choices"][0]["logprobs"], versions[1])
    assert said(api) != before
    seen = {httpx.get(f"{api.base_url}/v1/models").json()["data"][0]["weight_version"]}
    seen |= {httpx.get(f"{api.admin_url}/admin/status").json()["weight_version"] for _ in range(8)}
    assert seen == {versions[1]}

    assert update(api, first, "abort").status_code == 200
    assert said(api) == before
    assert api.is_idle()
