"""One frozen tree of settings: TOML file, flags on top, `--set section.key=value` for the rest. Unknown keys refused.

Defaults live here and nowhere else. Derived values are properties; nothing is written back.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from cluster.config_tree import check_known, wrong_type
from cluster.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]iB|B)?")


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "4GiB", "1048576". Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"size {text!r} is not a number with KiB, MiB, GiB or TiB, for example 512MiB"
        )
    return int(match[1]) * _UNITS[match[2] or ""]


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dir: str = ""
    """Checkpoint directory; empty: the bundled demo model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    served_name: str = ""
    """Model name in the API; empty: the directory's name."""
    max_len: int = 0
    """Context in tokens; 0: the model's."""


class CellSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ep_size: int = 0
    """Expert-parallel ranks; 0: the number of GPUs, on CPU 4."""
    dispatch: Literal["auto", "negotiated", "planned"] = "auto"
    exchange: Literal["auto", "gloo", "nccl"] = "auto"
    deterministic: bool = False
    start_timeout_seconds: float = 300.0
    placement_timeout_seconds: float = 60.0
    """How long a start waits for room that others hold."""
    exchange_timeout_seconds: float = 120.0
    """Longest wait of a rank inside one exchange; the engine's step deadline normally ends it earlier."""
    step_timeout_factor: float = 50.0
    """A step's deadline is this multiple of its predicted time …"""
    step_timeout_floor_seconds: float = 20.0
    """… but at least this, so that a scheduling hiccup of the machine is not a dead rank."""
    recovery_limit_seconds: float = 300.0
    """So long may ranks that were lost take to come back, while requests wait; 0: the first loss ends the cell."""


class SchedulerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_num_batched_tokens: int = 512
    """Token budget per rank and step."""
    max_num_seqs: int = 64
    """Running sequences per rank."""
    plan_wait_seconds: float = 0.5
    """How long a request that replays waits for its first plan before it replays negotiated."""
    max_num_waiting: int = 4096
    """Requests that may queue in a cell; one more is refused with 429."""


class StoreSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    block_size: int = 16
    num_kv_blocks: int = 0
    """Per rank; 0: as many as fit kv_memory."""
    kv_memory: str = "64MiB"
    """Per rank."""
    route_memory: str = "256MiB"
    """Per cell."""
    score_memory: str = "64MiB"
    """Per cell."""
    plan_memory: str = "64MiB"
    """Compiled plan fragments per rank."""
    route_replay: bool = True
    state_dir: str = ""
    """Where routes and scores are kept over restarts, on the engine's host; empty: nowhere."""
    state_size: str = ""
    """Of all files there, at most; empty: four times what full routes and scores take."""
    fsync_seconds: float = 1.0
    """So long may what is published be in the system's memory alone; 0: each write is synced."""


class HttpSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    admin_key_file: str = ""
    """Needed where admin_host is not loopback."""
    servers: int = 1
    """HTTP server processes that share both ports."""
    max_body_bytes: int = 32 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    """Of all bodies that one server reads or parses at a time; a further one is a 503."""
    api_key_file: str = ""
    tool_call_parser: Literal["auto", "none", "hermes", "deepseek", "mistral"] = "auto"
    """Of calls in answers; auto: the format that the model's chat template shows calls in."""
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = "auto"
    """Of reasoning in answers; auto: qwen3 if the chat template knows <think>."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may ask from a browser; *: all."""
    tls_cert: str = ""
    tls_key: str = ""
    access_log: bool = True
    """A line per request."""
    tracing: bool = False
    """OpenTelemetry traces, also without an endpoint in the OTEL_* environment."""
    drain_seconds: float = 20.0
    """So long may answers that have begun go on after SIGTERM or SIGHUP."""
    write_timeout_seconds: float = 60.0
    """A client that does not read for so long is given up."""


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    address: str = ""
    """Of a Ray that runs: HOST:PORT of its head, or auto on one of its hosts; empty: one of the cell's own."""
    hosts: tuple[str, ...] = ()
    """Addresses of hosts without which a start waits."""
    num_hosts: int = 0
    """So many must be there, whichever they are."""
    hosts_timeout_seconds: float = 300.0
    head_timeout_seconds: float = 30.0
    """So long a cell serves without Ray's head. Ray's own processes end after 60 s without it, unless they are started
    with another RAY_gcs_rpc_server_reconnect_timeout_s."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: ModelSection = ModelSection()
    cell: CellSection = CellSection()
    scheduler: SchedulerSection = SchedulerSection()
    store: StoreSection = StoreSection()
    http: HttpSection = HttpSection()
    cluster: ClusterSection = ClusterSection()


def load_config(file: Path | None, overrides: dict[str, Any]) -> Config:
    """Config from an optional TOML file with overrides by dotted path on top.

    Raises ConfigError naming the key, the value and what is expected.
    """
    tree: dict[str, Any] = _read_toml(file) if file is not None else {}
    for path, value in overrides.items():
        _assign(tree, path, value)
    check_known(tree, Config)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise wrong_type(tree, error) from error
    _check_ranges(config)
    return config


def parse_set(assignment: str) -> tuple[str, Any]:
    """`section.key=value` of `--set`; the value is read as TOML, else taken as a string."""
    path, separator, text = assignment.partition("=")
    if not separator or path.count(".") != 1:
        raise ConfigError(f"--set {assignment!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return path.strip(), value


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not a TOML file: {error}") from error


def _assign(tree: dict[str, Any], path: str, value: Any) -> None:
    section, key = path.split(".")
    branch = tree.setdefault(section, {})
    if not isinstance(branch, dict):
        raise ConfigError(f"configuration: {section} must be a table, got {branch!r}")
    branch[key] = value


def _check_ranges(config: Config) -> None:
    scheduler, store, http = config.scheduler, config.store, config.http
    checks = [
        ("model.max_len", config.model.max_len, 0, 2**31 - 1),
        ("cell.ep_size", config.cell.ep_size, 0, 4096),
        ("cell.start_timeout_seconds", config.cell.start_timeout_seconds, 1, 86400),
        ("cell.placement_timeout_seconds", config.cell.placement_timeout_seconds, 0, 86400),
        ("cell.exchange_timeout_seconds", config.cell.exchange_timeout_seconds, 1, 86400),
        ("cell.step_timeout_factor", config.cell.step_timeout_factor, 2, 10000),
        ("cell.step_timeout_floor_seconds", config.cell.step_timeout_floor_seconds, 0.1, 3600),
        ("cell.recovery_limit_seconds", config.cell.recovery_limit_seconds, 0, 86400),
        ("scheduler.max_num_batched_tokens", scheduler.max_num_batched_tokens, 1, 2**20),
        ("scheduler.max_num_seqs", scheduler.max_num_seqs, 1, 2**16),
        ("scheduler.plan_wait_seconds", scheduler.plan_wait_seconds, 0, 3600),
        ("scheduler.max_num_waiting", scheduler.max_num_waiting, 1, 2**20),
        ("store.block_size", store.block_size, 1, 1024),
        ("store.num_kv_blocks", store.num_kv_blocks, 0, 2**31 - 1),
        ("store.fsync_seconds", store.fsync_seconds, 0, 3600),
        ("cluster.num_hosts", config.cluster.num_hosts, 0, 4096),
        ("cluster.hosts_timeout_seconds", config.cluster.hosts_timeout_seconds, 0, 86400),
        ("cluster.head_timeout_seconds", config.cluster.head_timeout_seconds, 1, 86400),
        ("http.port", http.port, 0, 65535),
        ("http.admin_port", http.admin_port, 0, 65535),
        ("http.servers", http.servers, 1, 64),
        ("http.drain_seconds", http.drain_seconds, 0, 86400),
        ("http.write_timeout_seconds", http.write_timeout_seconds, 0.1, 86400),
        ("http.max_body_bytes", http.max_body_bytes, 1024, 2**31 - 1),
        ("http.max_bodies_bytes", http.max_bodies_bytes, http.max_body_bytes, 2**40),
    ]
    for name, value, low, high in checks:
        if not low <= value <= high:
            raise ConfigError(f"{name} = {value} is out of range: {low} to {high}")
    for key in ("kv_memory", "route_memory", "score_memory", "plan_memory"):
        _check_size(f"store.{key}", getattr(store, key))
    if store.state_size:
        _check_size("store.state_size", store.state_size)


def _check_size(name: str, text: str) -> None:
    try:
        parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
