"""The flags that people set, in groups, each with the setting it stands for. Defaults come from `cluster.config`."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import Config


@dataclass(frozen=True)
class Flag:
    """One flag; `path` is the setting's dotted path, `options` are argparse's."""

    name: str
    path: str
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def help(self) -> str:
        """With the default, unless the text says what an empty one means."""
        section, key = self.path.split(".")
        default = getattr(getattr(Config(), section), key)
        told = bool(default) and default is not True
        return f"{self.text} (default: {default})" if told else self.text


_N = {"type": int, "metavar": "N"}
_SIZE = {"metavar": "SIZE"}

MODEL_FLAGS = (
    Flag("--model", "model.dir", "checkpoint directory (default: the bundled demo model)", {"metavar": "DIR"}),
    Flag("--served-model-name", "model.served_name", "its name in the API (default: the directory's)",
         {"metavar": "NAME"}),
    Flag("--dtype", "model.dtype", "auto: float32 on CPU, the checkpoint's on CUDA",
         {"choices": ["auto", "float32", "bfloat16"]}),
    Flag("--max-model-len", "model.max_len", "longest context in tokens (default: the model's, as far as one "
         "rank's KV pool holds it)", _N),
)  # fmt: skip
CELL_FLAGS = (
    Flag("--ep-size", "cell.ep_size", "number of ranks that share the experts, a divisor of the number of routed "
         "experts (default: the number of GPUs, on CPU 4)", _N),
    Flag("--dispatch", "cell.dispatch", "how tokens reach the ranks of their experts",
         {"choices": ["auto", "negotiated", "planned"]}),
    Flag("--exchange", "cell.exchange", "what moves rows between ranks; auto: gloo on CPU, nccl on CUDA",
         {"choices": ["auto", "gloo", "nccl"]}),
    Flag("--deterministic", "cell.deterministic", "byte-equal results whatever is cached, chunked, replayed or "
         "beside it (float32 on CPU, slower)", {"action": "store_const", "const": True}),
    Flag("--recovery-limit", "cell.recovery_limit_seconds", "so long may ranks, or the engine, that died or hang "
         "take to come back, while requests wait; 0: the first loss ends the cell",
         {"type": float, "metavar": "SECONDS"}),
    Flag("--max-num-batched-tokens", "scheduler.max_num_batched_tokens", "most tokens per rank and step", _N),
    Flag("--max-num-seqs", "scheduler.max_num_seqs", "most running sequences per rank", _N),
)  # fmt: skip
MEMORY_FLAGS = (
    Flag("--kv-memory", "store.kv_memory", "KV pool of each rank", _SIZE),
    Flag("--num-kv-blocks", "store.num_kv_blocks", "KV pool of each rank in blocks, instead of --kv-memory", _N),
    Flag("--route-memory", "store.route_memory", "recorded routes of the whole cell, at least those of all KV blocks",
         _SIZE),
    Flag("--score-memory", "store.score_memory", "recorded log-probs of the whole cell, 16 bytes a token and 8 for "
         "each alternative after the first; holding them takes about half as much again", _SIZE),
)  # fmt: skip
STATE_FLAGS = (
    Flag("--state-dir", "store.state_dir", "directory on the engine's host in which routes and scores outlive a "
         "restart (default: none); token ids of prompts are in it", {"metavar": "DIR"}),
    Flag("--state-size", "store.state_size", "of all files in it, at most (default: four times what full routes and "
         "scores take)", _SIZE),
    Flag("--fsync-seconds", "store.fsync_seconds", "a crash of the host may cost so much of what was published, 0: "
         "each write is synced", {"type": float, "metavar": "SECONDS"}),
)  # fmt: skip
HTTP_FLAGS = (
    Flag("--host", "http.host", "address to listen on", {"metavar": "ADDRESS"}),
    Flag("--port", "http.port", "port to listen on, 0: any free one", _N),
    Flag("--admin-host", "http.admin_host", "address of the admin endpoints; another than loopback needs "
         "--admin-key-file", {"metavar": "ADDRESS"}),
    Flag("--admin-port", "http.admin_port", "port of the admin endpoints, 0: any free one", _N),
    Flag("--admin-key-file", "http.admin_key_file", "file of the keys that the admin endpoints ask for, as "
         "--api-key-file (or POINTSMAN_ADMIN_KEYS)", {"metavar": "FILE"}),
    Flag("--http-servers", "http.servers", "HTTP server processes, which share both ports; one that dies is started "
         "again", _N),
    Flag("--api-key-file", "http.api_key_file", "file of the keys that clients must send, a line each: KEY, or TENANT "
         "KEY for prefixes shared within the tenant only (or POINTSMAN_API_KEYS)", {"metavar": "FILE"}),
    Flag("--tool-call-parser", "http.tool_call_parser", "format of tool calls in answers; auto: the one in which the "
         "model's chat template shows them", {"choices": ["auto", "none", "hermes", "deepseek", "mistral"]}),
    Flag("--reasoning-parser", "http.reasoning_parser", "how reasoning is marked in answers; auto: qwen3 if the chat "
         "template knows <think>", {"choices": ["auto", "none", "deepseek_r1", "qwen3"]}),
    Flag("--cors-origin", "http.cors_origins", "origin of web pages that may ask from a browser, may be repeated; *: "
         "all (default: none)", {"action": "append", "metavar": "ORIGIN"}),
    Flag("--tls-cert", "http.tls_cert", "PEM certificate with its chain: both ports speak HTTPS", {"metavar": "FILE"}),
    Flag("--tls-key", "http.tls_key", "its private key, without a passphrase", {"metavar": "FILE"}),
    Flag("--no-access-log", "http.access_log", "no line per request in the log",
         {"action": "store_const", "const": False}),
    Flag("--tracing", "http.tracing", "OpenTelemetry traces of requests, as the OTEL_* environment says; an OTLP "
         "endpoint there is enough without the flag", {"action": "store_const", "const": True}),
    Flag("--drain-seconds", "http.drain_seconds", "how long answers that have begun may go on after SIGTERM or SIGHUP; "
         "Ctrl-C or a second signal ends them", {"type": float, "metavar": "SECONDS"}),
)  # fmt: skip
CLUSTER_FLAGS = (
    Flag("--address", "cluster.address", "Ray cluster to serve on: HOST:PORT of its head, or auto on one of its hosts "
         "(default: a Ray of the cell's own on this machine)", {"metavar": "ADDRESS"}),
)  # fmt: skip
CELL_GROUPS = {
    "model": MODEL_FLAGS,
    "expert-parallel cell": CELL_FLAGS,
    "memory (sizes: 512MiB, 4GiB)": MEMORY_FLAGS,
}
CHECK_GROUPS = CELL_GROUPS | {"state on disk": STATE_FLAGS}
SERVE_GROUPS = CHECK_GROUPS | {"HTTP": HTTP_FLAGS, "hosts": CLUSTER_FLAGS}


def add_settings(command: argparse.ArgumentParser, groups: Mapping[str, Collection[Flag]]) -> None:
    for title, flags in groups.items():
        group = command.add_argument_group(title)
        for flag in flags:
            group.add_argument(
                flag.name, dest=flag.path, default=None, help=flag.help, **flag.options
            )
    rest = command.add_argument_group("other settings")
    rest.add_argument("--config", type=Path, metavar="FILE", help="TOML file; flags win over it")
    rest.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting of the TOML file, may be repeated, for example "
        "cell.step_timeout_floor_seconds=60",
    )


def given(parsed: argparse.Namespace) -> dict[str, Any]:
    """Settings of the flags that were used, by dotted path."""
    return {
        path: value for path, value in vars(parsed).items() if "." in path and value is not None
    }
