"""Pages of other origins (CORS) and encrypted connections: neither unless asked for."""

import ssl
from pathlib import Path

import httpx
import pytest

from cluster.errors import ConfigError
from router_service.api_keys import parse_api_keys
from router_service.http_server import HttpServer
from router_service.origins import check_origins
from router_service.tls_files import TlsFiles, tls_files
from tests.helpers.certificates import CERTIFICATE, KEY
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    COMPLETIONS,
    completion_body,
    events,
    make_options,
    running_server,
)

PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-api-key",
}


def test_no_page_may_ask_by_default(client: httpx.Client) -> None:
    assert client.options(COMPLETIONS, headers=PREFLIGHT).status_code == 405
    answer = client.post(COMPLETIONS, json=completion_body(), headers={"origin": PAGE})
    assert [name for name in answer.headers if name.startswith("access-control")] == []


def test_a_listed_page_may_ask_and_read_also_what_went_wrong() -> None:
    keys = parse_api_keys("key", "keys")
    with (
        ScriptedEngine() as engine,
        running_server(engine, cors_origins=(PAGE,), api_keys=keys) as (client, _),
    ):
        allowed = client.options(COMPLETIONS, headers=PREFLIGHT)
        headers = {"origin": PAGE, "x-api-key": "key"}
        answers = [
            client.post(COMPLETIONS, json=completion_body(), headers=headers),
            client.post(COMPLETIONS, json={}, headers=headers),
            client.post(COMPLETIONS, json=completion_body(), headers={"origin": PAGE}),
        ]
        elsewhere = client.get("/health", headers={"origin": "https://other.example"})
        refused = client.options(COMPLETIONS, headers=PREFLIGHT | {"origin": "https://o.example"})
    assert allowed.status_code == 200
    assert (
        allowed.headers["access-control-allow-headers"]
        == PREFLIGHT["access-control-request-headers"]
    )
    assert [answer.status_code for answer in answers] == [200, 400, 401]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {PAGE}
    assert all("x-request-id" in a.headers["access-control-expose-headers"] for a in answers)
    assert "access-control-allow-origin" not in elsewhere.headers
    assert refused.status_code == 400


@pytest.mark.parametrize(
    "origin", ["*", "https://a.example", "http://localhost:3000", "http://[::1]:80", "app://x"]
)
def test_origins_as_browsers_send_them_are_taken(origin: str) -> None:
    check_origins([origin])


@pytest.mark.parametrize(
    "origin", ["", "a.example", "https://", "https://a/", "HTTPS://a", "https://*.a", "null"]
)
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--cors-origin"):
        check_origins(["*", origin])


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(CERTIFICATE)
    key.write_text(KEY)
    found = tls_files(str(cert), str(key))
    assert found is not None
    return found


def test_with_a_certificate_both_ports_speak_tls_and_only_that(files: TlsFiles) -> None:
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with ScriptedEngine() as engine:
        server = HttpServer(make_options(engine.endpoint, tls=files))
        ports = server.start()
        with httpx.Client(verify=trusting, timeout=30) as client:
            url = f"https://localhost:{ports.port}"
            answer = client.post(f"{url}{COMPLETIONS}", json=completion_body(stream=True))
            assert len(events(answer)) > 1
            status = client.get(f"https://localhost:{ports.admin_port}/admin/status")
            assert status.status_code == 200
        for port in (ports.port, ports.admin_port):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=30)
        server.stop(2)
