"""Two HTTP servers on one port: the same answers from both, and one of them may die."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.served import Served, address_of, eventually
from tests.integration.api import CellApi, completion_body, random_prompt
from tests.integration.conftest import SHARED_CELL_FLAGS
from tests.integration.open_requests import OpenRequests, health
from tests.integration.told import CHAT, COMPLETIONS, told_streamed, told_whole

pytestmark = pytest.mark.ray
RESTART_SECONDS = 60.0
NUM_CONNECTIONS = 64
"""That all of them go to the same one of two servers happens once in 10^19 times."""


@pytest.fixture(scope="module")
def two_servers() -> Iterator[Served]:
    with Served(*SHARED_CELL_FLAGS, "--http-servers", "2") as served:
        served.wait_until_ready()
        yield served
        served.interrupt()
        assert served.wait(10.0) == 0
        served.assert_nothing_left()


@pytest.fixture
def pids(two_servers: Served) -> list[int]:
    """Of both, once both serve."""

    def both() -> list[int] | None:
        found = two_servers.pids_of("HttpServer")
        return found if len(found) == 2 and all(_listens(two_servers, p) for p in found) else None

    return eventually(both, RESTART_SECONDS, "two HTTP servers")


@pytest.fixture
def two_api(two_servers: Served) -> Iterator[CellApi]:
    with CellApi(two_servers.base_url, two_servers.admin_url) as api:
        yield api
        assert api.is_idle()


def _listens(served: Served, pid: int) -> bool:
    port = address_of(served.base_url)[1]
    connections = psutil.Process(pid).net_connections("tcp")
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def _clients_of(served: Served, pid: int) -> set[int]:
    """Local ports of the clients whose connections this process has accepted."""
    port = address_of(served.base_url)[1]
    connections = psutil.Process(pid).net_connections("tcp")
    return {
        c.raddr.port
        for c in connections
        if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port
    }


def _connect(served: Served, stack: ExitStack) -> tuple[httpx.Client, int]:
    """A client with one connection, and the local port of that."""
    limits = httpx.Limits(max_connections=1)
    client = httpx.Client(base_url=served.base_url, limits=limits, timeout=60.0)
    stack.enter_context(client)
    with client.stream("GET", "/health/live") as answer:
        answer.read()
        port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
    return client, port


def _client_of(served: Served, pid: int, stack: ExitStack) -> httpx.Client:
    """One whose connection this process has."""
    for _ in range(NUM_CONNECTIONS):
        client, port = _connect(served, stack)
        if port in _clients_of(served, pid):
            return client
    raise AssertionError(f"no connection reached process {pid}")


def _idle_again(served: Served) -> bool:
    try:
        status = httpx.get(f"{served.admin_url}/admin/status", timeout=10.0).json()
    except httpx.TransportError:
        return False
    return bool(status["num_running"] == status["num_waiting"] == 0)


def _answer(client: httpx.Client, prompt_number: int, **fields: Any) -> dict[str, Any]:
    """Without what names the answer."""
    body = completion_body(
        random_prompt(prompt_number, 40),
        12,
        return_token_ids=True,
        return_routed_experts=True,
        **fields,
    )
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return {name: whole[name] for name in ("choices", "usage", "prompt_token_ids")}


def _question(path: str) -> dict[str, Any]:
    body = completion_body(random_prompt(80, 40), 12)
    if path == CHAT:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "Tell me of the sea."}]
    return body


def test_connections_reach_both_processes(two_servers: Served, pids: list[int]) -> None:
    with ExitStack() as stack:
        ports = set()
        for _ in range(NUM_CONNECTIONS):
            _, port = _connect(two_servers, stack)
            ports.add(port)
        accepted = Counter({pid: len(_clients_of(two_servers, pid) & ports) for pid in pids})
    assert accepted.total() == NUM_CONNECTIONS
    assert min(accepted.values()) > 0


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0, "seed": 5, "top_k": 50, "min_p": 0.01}], ids=str
)
def test_either_answers_as_the_only_server_of_a_cell(
    fields: dict[str, Any], two_servers: Served, pids: list[int], two_api: CellApi, api: CellApi
) -> None:
    with ExitStack() as stack:
        only = stack.enter_context(httpx.Client(base_url=api.base_url, timeout=60.0))
        clients = [_client_of(two_servers, pid, stack) for pid in pids]
        answers = [_answer(c, 77, cache_salt=str(n), **fields) for n, c in enumerate(clients)]
        assert answers == [_answer(only, 77, cache_salt="only", **fields)] * 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"logprobs": 3}),
        (COMPLETIONS, {"logprobs": 1, "echo": True}),
        (COMPLETIONS, {"logprobs": 2, "n": 3, "temperature": 1.0, "seed": 6, "stop": [" the"]}),
        (CHAT, {}),
        (CHAT, {"logprobs": True, "top_logprobs": 3}),
        (CHAT, {"logprobs": True, "n": 3, "temperature": 1.0, "seed": 7, "stop": ["e"]}),
    ],
    ids=str,
)
def test_either_says_the_same_whole_and_streamed_as_the_only_server_of_a_cell(
    path: str,
    fields: dict[str, Any],
    two_servers: Served,
    pids: list[int],
    two_api: CellApi,
    api: CellApi,
) -> None:
    ask = _question(path) | fields
    told = []
    with ExitStack() as stack:
        only = stack.enter_context(httpx.Client(base_url=api.base_url, timeout=60.0))
        for client in (only, *(_client_of(two_servers, pid, stack) for pid in pids)):
            for tell in (told_whole, told_streamed):
                salt = f"{fields} {len(told)}"
                told.append(tell(client, path, ask | {"cache_salt": salt}))
    assert told == [told[0]] * 6
    assert len(told[0].choices) == fields.get("n", 1)
    assert any(choice.text for choice in told[0].choices)
    assert all(bool(choice.logprobs) == ("logprobs" in fields) for choice in told[0].choices)


def test_what_one_server_computed_the_other_takes_from_the_store(
    two_servers: Served, pids: list[int], two_api: CellApi
) -> None:
    with ExitStack() as stack:
        first, second = (_client_of(two_servers, pid, stack) for pid in pids)
        computed, cached = _answer(first, 78), _answer(second, 78)
    assert cached["choices"] == computed["choices"]
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_the_metrics_of_either_show_the_whole_cell_once(
    two_servers: Served, pids: list[int], two_api: CellApi
) -> None:
    before = two_api.metrics()
    with ExitStack() as stack:
        clients = [_client_of(two_servers, pid, stack) for pid in pids]
        for number, client in enumerate([*clients, clients[0]]):
            _answer(client, 100 + number)
        assert two_api.is_idle()
        shown = [client.get("/metrics").text for client in clients]
    assert shown[0] == shown[1]
    rise = two_api.rise_since(before)
    assert rise["pointsman_requests_finished_total", ("length",)] == 3
    assert rise["pointsman_generation_tokens_total", ()] == 3 * 12


def test_the_streams_of_a_killed_server_break_and_those_of_the_other_go_on(
    two_servers: Served, pids: list[int], two_api: CellApi
) -> None:
    requests = OpenRequests(two_servers, num_streams=16, max_tokens=400)
    lost, kept = (len(_clients_of(two_servers, pid)) for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    eventually(lambda: pids[0] not in two_servers.pids_of("HttpServer"), 10.0, "its end")
    assert eventually(lambda: _answers(two_servers), 10.0, "answers of the other server")
    assert two_api.complete(random_prompt(300, 20), 4)["usage"]["completion_tokens"] == 4
    ends = requests.stream_ends(120.0)
    assert (sum(end.broken for end in ends), sum(end.done for end in ends)) == (lost, kept)
    assert lost + kept == len(ends)
    assert min(lost, kept) > 0
    assert [end.errors for end in ends if end.done] == [[]] * kept


def test_the_requests_of_a_killed_server_are_dropped(
    two_servers: Served, pids: list[int], two_api: CellApi
) -> None:
    requests = OpenRequests(two_servers, num_streams=8)
    aborted = two_api.metrics().get(("pointsman_requests_finished_total", ("abort",)), 0.0)
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    assert all(end.broken for end in requests.stream_ends(20.0))
    eventually(lambda: two_servers.pids_of("HttpServer"), RESTART_SECONDS, "an HTTP server")
    assert eventually(lambda: _idle_again(two_servers), RESTART_SECONDS, "an idle cell")
    assert two_api.metric("requests_finished_total", "abort") == aborted + 8


def test_killed_servers_are_started_again_and_serve(
    two_servers: Served, pids: list[int], two_api: CellApi
) -> None:
    os.kill(pids[0], signal.SIGKILL)

    def both_again() -> bool:
        now = set(two_servers.pids_of("HttpServer"))
        return len(now) == 2 and pids[0] not in now and all(_listens(two_servers, p) for p in now)

    assert eventually(both_again, RESTART_SECONDS, "two HTTP servers again")
    with ExitStack() as stack:
        for pid in two_servers.pids_of("HttpServer"):
            assert _answer(_client_of(two_servers, pid, stack), 79)["usage"]["completion_tokens"]


def _answers(served: Served) -> bool:
    """To every one of 20 new connections. The system may give one to a process that is just ending."""
    try:
        return all(health(served).status_code == 200 for _ in range(20))
    except httpx.TransportError:
        return False
