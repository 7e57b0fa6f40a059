"""`pointsman serve` with all that a public server has: two HTTP servers, TLS, CORS and traces. Then a signal ends it,
and what has begun is answered."""

import ssl
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from tests.helpers.certificates import CERTIFICATE, KEY
from tests.helpers.served import GONE_SECONDS, Served, address_of, eventually
from tests.helpers.trace_receiver import attributes, trace_receiver
from tests.integration.api import random_prompt
from tests.integration.open_requests import OpenRequests

pytestmark = pytest.mark.ray
PAGE = "https://page.example"
NUM_STREAMS = 16
"""That one of two servers has all of them happens once in 30,000 times."""
NUM_TOKENS = 400
"""Seconds of decoding, more than the second until a signal is seen and less than answers may take to end."""
TRUSTING = ssl.create_default_context(cadata=CERTIFICATE)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(CERTIFICATE)
    key.write_text(KEY)
    key.chmod(0o600)
    public = ["--http-servers", "2", "--cors-origin", PAGE, "--drain-seconds", "60"]
    return ["--ep-size", "1", *public, "--tls-cert", str(cert), "--tls-key", str(key)]


def test_it_serves_encrypted_and_traced_and_a_signal_lets_both_servers_end_their_answers(
    flags: list[str],
) -> None:
    with trace_receiver() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        with Served(*flags, environment=environment) as served:
            served.wait_until_ready()
            response_id = asked_with_the_openai_sdk(served)
            assert_a_page_may_ask(served)
            requests = OpenRequests(
                served,
                num_streams=NUM_STREAMS,
                num_whole=1,
                max_tokens=NUM_TOKENS,
                verify=TRUSTING,
            )
            clients = clients_by_server(served)
            assert len(clients) == 2
            assert min(clients.values()) > 0
            served.terminate()
            served.wait_for_stderr("stopping: ", 5.0)
            eventually(lambda: not accepts(served), 10.0, "a closed port")
            assert not any(open.done() for open in (*requests.streams, *requests.whole))
            assert served.wait(60.0 + GONE_SECONDS) == 0
            served.assert_nothing_left()
        ends = [(end.done, end.errors) for end in requests.stream_ends(5.0)]
        assert ends == [(True, [])] * NUM_STREAMS
        (answer,) = requests.answers(5.0)
        assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
        traced = [attributes(span) for span, _ in receiver.spans]
    generated = [span for span in traced if "gen_ai.response.id" in span]
    assert response_id in {span["gen_ai.response.id"] for span in generated}
    assert len(generated) == 1 + NUM_STREAMS + 1


def asked_with_the_openai_sdk(served: Served) -> str:
    with (
        httpx.Client(verify=TRUSTING, timeout=60.0) as http,
        OpenAI(base_url=f"{served.base_url}/v1", api_key="unused", http_client=http) as client,
    ):
        completion = client.completions.create(
            model=served.model, prompt=random_prompt(90, 20), max_tokens=3
        )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3
    return completion.id


def assert_a_page_may_ask(served: Served) -> None:
    url = f"{served.base_url}/v1/completions"
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    told = httpx.options(url, headers=asks, verify=TRUSTING, timeout=60.0)
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, PAGE)
    other = httpx.options(
        url, headers=asks | {"origin": "https://o.example"}, verify=TRUSTING, timeout=60.0
    )
    assert other.status_code == 400


def clients_by_server(served: Served) -> Counter[int]:
    """Open connections of both processes."""
    port = address_of(served.base_url)[1]
    return Counter(
        {
            pid: sum(
                c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port
                for c in psutil.Process(pid).net_connections("tcp")
            )
            for pid in served.pids_of("HttpServer")
        }
    )


def accepts(served: Served) -> bool:
    try:
        httpx.get(f"{served.base_url}/health/live", verify=TRUSTING, timeout=10.0)
    except httpx.ConnectError:
        return False
    return True
