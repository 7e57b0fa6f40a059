"""The `pointsman` command: flags to settings, errors to exit codes (2: cannot be served as asked; 1: failed)."""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.config import Config, load_config, parse_set
from cluster.errors import ConfigError, PointsmanError
from deploy.ray_environment import set_ray_environment

_FLAGS: list[tuple[str, str, str, dict[str, Any]]] = [
    # flag, dotted path, help, argparse options
    ("--model", "model.dir", "checkpoint directory (default: the bundled demo model)", {"metavar": "DIR"}),
    ("--dtype", "model.dtype", "auto: float32 on CPU, the checkpoint's on CUDA",
     {"choices": ["auto", "float32", "bfloat16"]}),
    ("--served-model-name", "model.served_name", "model name in the API", {"metavar": "NAME"}),
    ("--max-model-len", "model.max_len", "context in tokens (default: the model's)",
     {"type": int, "metavar": "N"}),
    ("--ep-size", "cell.ep_size", "expert-parallel ranks (default: number of GPUs, on CPU 4); "
     "a divisor of the number of routed experts", {"type": int, "metavar": "N"}),
    ("--dispatch", "cell.dispatch", "how tokens reach their experts' ranks",
     {"choices": ["auto", "negotiated"]}),
    ("--exchange", "cell.exchange", "what moves rows between ranks",
     {"choices": ["auto", "gloo", "nccl"]}),
    ("--deterministic", "cell.deterministic",
     "byte-equal results whatever is cached, chunked, replayed or beside it (float32, slower)",
     {"action": "store_const", "const": True}),
    ("--max-num-batched-tokens", "scheduler.max_num_batched_tokens", "tokens per rank and step",
     {"type": int, "metavar": "N"}),
    ("--max-num-seqs", "scheduler.max_num_seqs", "running sequences per rank",
     {"type": int, "metavar": "N"}),
    ("--num-kv-blocks", "store.num_kv_blocks", "KV blocks per rank (instead of --kv-memory)",
     {"type": int, "metavar": "N"}),
    ("--kv-memory", "store.kv_memory", "KV pool per rank, for example 512MiB", {"metavar": "SIZE"}),
    ("--route-memory", "store.route_memory", "recorded routes per cell", {"metavar": "SIZE"}),
    ("--host", "http.host", "address to listen on (default 127.0.0.1)", {}),
    ("--port", "http.port", "port to listen on (default 8000; 0: any free one)",
     {"type": int, "metavar": "N"}),
    ("--admin-port", "http.admin_port", "port of the admin endpoints, on loopback (default 8001)",
     {"type": int, "metavar": "N"}),
    ("--api-key-file", "http.api_key_file", "file whose first line clients must send as bearer token",
     {"metavar": "FILE"}),
]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        config = _config(parsed)
        if parsed.command == "check":
            return _check(config, parsed.json)
        if parsed.command == "bench":
            return _bench(config, parsed.json)
        return _serve(config)
    except ConfigError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return 2
    except PointsmanError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there was anything to take down
        print("pointsman: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pointsman",
        description="Serve a Mixture-of-Experts model over expert-parallel workers with a joint prefix store.",
    )
    parser.add_argument("--version", action="version", version=version("pointsman"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="start a cell on this machine and serve the OpenAI API"
    )
    check = commands.add_parser(
        "check", help="does a model load, and what would each rank hold; starts nothing"
    )
    check.add_argument("model_dir", nargs="?", metavar="MODEL_DIR", help="default: the demo model")
    check.add_argument(
        "--json", type=Path, metavar="FILE", help="also write it as JSON (overwrites)"
    )
    bench = commands.add_parser("bench", help="measure this machine")
    bench.add_argument(
        "what", choices=["control"], help="control: a step's time outside the forward"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write JSON (overwrites)")
    for command in (serve, check, bench):
        _add_settings(command)
    return parser


def _add_settings(command: argparse.ArgumentParser) -> None:
    for flag, path, text, options in _FLAGS:
        command.add_argument(flag, dest=path, default=None, help=text, **options)
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file; flags win over it")
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting"
    )


def _config(parsed: argparse.Namespace) -> Config:
    overrides = dict(parse_set(assignment) for assignment in parsed.set)
    values = vars(parsed)
    overrides |= {path: values[path] for _, path, _, _ in _FLAGS if values[path] is not None}
    if getattr(parsed, "model_dir", None):
        overrides["model.dir"] = parsed.model_dir
    return load_config(parsed.config, overrides)


def _check(config: Config, json_file: Path | None) -> int:
    from deploy.check import describe, table
    from deploy.planning import plan_cell  # imports torch: two seconds that --help must not cost

    description = describe(plan_cell(config))
    print(table(description))
    if json_file is not None:
        json_file.write_text(json.dumps(description, indent=2) + "\n")
    return 0


def _bench(config: Config, json_file: Path | None) -> int:
    from deploy.bench import control  # as above
    from deploy.bench.report import report, write

    ep_sizes = [config.cell.ep_size] if config.cell.ep_size else control.EP_SIZES
    write(report(control.run(config, ep_sizes)), json_file)
    return 0


def _serve(config: Config) -> int:
    from deploy.planning import plan_cell  # as above

    plan = plan_cell(config)
    set_ray_environment()
    from deploy.supervisor import serve  # imports Ray, which must find its environment set

    return serve(config, plan)


if __name__ == "__main__":
    sys.exit(main())
