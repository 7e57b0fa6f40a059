"""What a server says of the doors that it opens, and which count as loopback."""

import pytest

from cluster.config import HttpSection
from deploy.exposure import check_exposure, exposures, is_loopback
from deploy.ray_authentication import check_ray_authentication, set_own_token
from router_service.api_keys import HttpKeys, parse_api_keys

KEYS = parse_api_keys("key", "keys")
OPEN = "--host 0.0.0.0: whoever reaches it may ask; --api-key-file says who may"
ANY_PAGE = (
    "--cors-origin *: any web page in a browser that reaches this server may ask it; "
    "--api-key-file says who may"
)
IN_CLEAR = "0.0.0.0: keys and answers cross the network unencrypted; --tls-cert encrypts them"


@pytest.mark.parametrize(
    ("settings", "keys", "lines"),
    [
        ({}, HttpKeys(), []),
        ({"host": "0.0.0.0"}, HttpKeys(), [OPEN]),
        ({"host": "0.0.0.0"}, HttpKeys(api=KEYS), [f"--host {IN_CLEAR}"]),
        ({"host": "0.0.0.0", "tls_cert": "cert.pem"}, HttpKeys(api=KEYS), []),
        ({"host": "0.0.0.0", "tls_cert": "cert.pem"}, HttpKeys(), [OPEN]),
        ({"cors_origins": ("*",)}, HttpKeys(), [ANY_PAGE]),
        ({"cors_origins": ("*",)}, HttpKeys(api=KEYS), []),
        ({"cors_origins": ("https://page.example",)}, HttpKeys(), []),
        ({"admin_host": "0.0.0.0"}, HttpKeys(admin=KEYS), [f"--admin-host {IN_CLEAR}"]),
        ({"admin_host": "0.0.0.0", "tls_cert": "cert.pem"}, HttpKeys(admin=KEYS), []),
    ],
)
def test_what_is_open_is_told_in_a_line_each(
    settings: dict[str, object], keys: HttpKeys, lines: list[str]
) -> None:
    http = HttpSection(**settings)
    check_exposure(http, keys)
    assert exposures(http, keys) == lines


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_is_known_by_address_and_by_name(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-name.invalid"])
def test_all_else_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "environment", [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "Token"}]
)
def test_rays_authentication_is_on_unless_somebody_switches_it_off(
    environment: dict[str, str],
) -> None:
    check_ray_authentication(environment)


def test_a_ray_of_our_own_has_a_token_that_nobody_else_knows() -> None:
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    set_own_token(first)
    set_own_token(second)
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert len(first["RAY_AUTH_TOKEN"]) == 64


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_users_own_token_wins(name: str) -> None:
    environment = {name: "mine"}
    set_own_token(environment)
    assert environment == {name: "mine"}
