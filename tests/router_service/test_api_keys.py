"""A file of API keys: who is meant by which key, and what is said about a bad line without showing a key."""

import contextlib
from pathlib import Path

import pytest

from cluster.config import HttpSection
from cluster.errors import ConfigError
from deploy.api_keys import (
    ADMIN_KEYS_VARIABLE,
    API_KEYS_VARIABLE,
    read_http_keys,
    take_http_keys,
)
from router_service.api_keys import MAX_KEYS, Caller, HttpKeys, given_key, parse_api_keys

LINES = "# ours\nalice key-1\n\n  alice   key-2  \nbob key-3\nkey-4\n"


@pytest.mark.parametrize(
    ("key", "caller"),
    [
        (b"key-1", Caller("alice")),
        (b"key-2", Caller("alice")),
        (b"key-3", Caller("bob")),
        (b"key-4", Caller(None)),
        (b"", None),
        (b"key", None),
        (b"key-11", None),
        (b"alice key-1", None),
        (b"\xff\xfe", None),
    ],
)
def test_a_key_stands_for_its_tenant_and_nothing_else_does(
    key: bytes, caller: Caller | None
) -> None:
    assert parse_api_keys(LINES, "keys").caller_of(key) == caller


@pytest.mark.parametrize(
    "text",
    [
        "secret-1 secret-2 secret-3",
        "a secret-1\nb secret-1",
        "secret-\x00",
        "secret-é",
        f"{'t' * 65} secret-1",
        "tenant=secret- secret-1",
    ],
)
def test_a_bad_line_is_named_by_its_number_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="keys: line") as caught:
        parse_api_keys(text if "\n" in text else f"good\n{text}", "keys")
    assert "secret-" not in str(caught.value)


def test_nothing_of_a_key_can_be_printed() -> None:
    assert "key-1" not in repr(parse_api_keys(LINES, "keys"))


def test_more_keys_than_can_be_compared_at_each_request_are_refused() -> None:
    assert len(parse_api_keys("\n".join(f"k{i}" for i in range(MAX_KEYS)), "keys").keys) == MAX_KEYS
    with pytest.raises(ConfigError, match=f"{MAX_KEYS + 1} keys"):
        parse_api_keys("\n".join(f"k{i}" for i in range(MAX_KEYS + 1)), "keys")


@pytest.mark.parametrize(
    ("headers", "given"),
    [
        ({}, b""),
        ({b"authorization": b"Bearer one"}, b"one"),
        ({b"authorization": b"bearer  one "}, b"one"),
        ({b"x-api-key": b" two "}, b"two"),
        ({b"authorization": b"Bearer one", b"x-api-key": b"two"}, b"one"),
        ({b"authorization": b"Basic eDp5", b"x-api-key": b"two"}, b"two"),
    ],
)
def test_a_key_comes_as_bearer_token_or_in_a_header_of_its_own(
    headers: dict[bytes, bytes], given: bytes
) -> None:
    assert given_key(headers) == given


def test_keys_of_the_environment_are_taken_out_of_it() -> None:
    environment = {
        API_KEYS_VARIABLE: "alice key-1,key-2\nbob key-3",
        ADMIN_KEYS_VARIABLE: "carol key-4",
        "HOME": "/",
    }
    keys = take_http_keys(HttpSection(), environment)
    assert keys.api is not None
    assert keys.admin is not None
    assert keys.admin.caller_of(b"key-4") == Caller("carol")
    assert [keys.api.caller_of(f"key-{i}".encode()) for i in (1, 2, 3)] == [
        Caller("alice"),
        Caller(None),
        Caller("bob"),
    ]
    assert environment == {"HOME": "/"}


def test_an_empty_variable_is_a_mistake_and_not_an_open_door() -> None:
    with pytest.raises(ConfigError, match=f"{API_KEYS_VARIABLE}: holds no key"):
        read_http_keys(HttpSection(), {API_KEYS_VARIABLE: ""})


def test_keys_come_from_one_place() -> None:
    with pytest.raises(ConfigError, match="give one"):
        read_http_keys(HttpSection(api_key_file="file"), {API_KEYS_VARIABLE: "key"})
    assert read_http_keys(HttpSection(), {}) == HttpKeys()


def test_a_key_is_of_one_port_only() -> None:
    environment = {API_KEYS_VARIABLE: "alice key-1,key-2", ADMIN_KEYS_VARIABLE: "key-3,key-2"}
    with pytest.raises(ConfigError, match="an admin key is an API key too") as caught:
        read_http_keys(HttpSection(), environment)
    assert "key-2" not in str(caught.value)


@pytest.mark.parametrize(("mode", "is_private"), [(0o600, True), (0o640, True), (0o604, False)])
def test_a_key_file_is_not_for_every_user_of_the_host(
    tmp_path: Path, mode: int, is_private: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text("key-1\n")
    file.chmod(mode)
    http = HttpSection(api_key_file=str(file))
    refused = pytest.raises(ConfigError, match=r"keys: every user .* \(mode 0604\); chmod o= it")
    with contextlib.nullcontext() if is_private else refused:
        assert read_http_keys(http, {}).api is not None
