"""API keys and the tenants that they stand for. Only digests of keys are kept: nothing here can be logged by mistake.

Text: a line per key, `KEY` or `TENANT KEY`; empty lines and lines that begin with `#` are skipped. Keys without a
tenant are one party of their own.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import ConfigError

MAX_KEYS = 1000
"""Every request is compared with all of them: at 1000 about half a millisecond."""
MAX_TENANT_CHARACTERS = 64
_BEARER = b"bearer "


@dataclass(frozen=True)
class Caller:
    """Whom a request comes from. tenant: None without keys, and for a key without one."""

    tenant: str | None


@dataclass(frozen=True)
class _Key:
    digest: bytes
    caller: Caller


@dataclass(frozen=True)
class ApiKeys:
    keys: tuple[_Key, ...]

    def caller_of(self, given: bytes) -> Caller | None:
        """Whose key this is. Compares digests with every key, whichever matches, so that its time tells nothing."""
        digest, found = hashlib.sha256(given).digest(), None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.caller
        return found

    def shares_a_key_with(self, others: "ApiKeys") -> bool:
        return not {key.digest for key in self.keys}.isdisjoint(key.digest for key in others.keys)


@dataclass(frozen=True)
class HttpKeys:
    """Of the two ports. None: whoever reaches the port may ask."""

    api: ApiKeys | None = None
    admin: ApiKeys | None = None


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """What a request shows: its bearer token, else its `x-api-key`; empty without either."""
    authorization = headers.get(b"authorization", b"")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get(b"x-api-key", b"").strip()


def parse_api_keys(text: str, source: str) -> ApiKeys:
    """Raises ConfigError that names `source` and the line, and shows no key."""
    keys: dict[bytes, _Key] = {}
    first_lines: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"{source}: line {number}"
        key = _key(words, place)
        if key.digest in keys:
            raise ConfigError(f"{place} repeats the key of line {first_lines[key.digest]}")
        keys[key.digest], first_lines[key.digest] = key, number
    if not keys:
        raise ConfigError(f"{source}: holds no key; a line per key: KEY, or TENANT KEY")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{source}: holds {len(keys)} keys; the limit is {MAX_KEYS}")
    return ApiKeys(tuple(keys.values()))


def _key(words: list[str], place: str) -> _Key:
    if len(words) > 2:
        raise ConfigError(f"{place} has {len(words)} words; a line is KEY, or TENANT KEY")
    *tenants, key = words
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{place}: the key must be printable ASCII, else no header can hold it")
    tenant = tenants[0] if tenants else None
    if tenant is not None and not _is_name(tenant):
        raise ConfigError(
            f"{place}: the tenant must be 1 to {MAX_TENANT_CHARACTERS} letters, digits or any of _ . -"
        )
    return _Key(hashlib.sha256(key.encode()).digest(), Caller(tenant))


def _is_name(text: str) -> bool:
    """Of a tenant: it appears in logs."""
    plain = text.isascii() and text.replace("_", "").replace(".", "").replace("-", "").isalnum()
    return plain and len(text) <= MAX_TENANT_CHARACTERS
