"""The `pointsman` command: arguments to settings, errors to exit codes (2: cannot be served as asked; 1: failed)."""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from cluster.config import Config, load_config, parse_set
from cluster.errors import ConfigError, PointsmanError
from deploy.cell_plan import CellPlan
from deploy.flags import CELL_GROUPS, CHECK_GROUPS, SERVE_GROUPS, add_settings, given
from deploy.json_output import check_writable, write_json
from deploy.ray_authentication import check_ray_authentication
from deploy.ray_environment import set_joined_ray_environment, set_ray_environment

INTERRUPTED = 130
_SERVE_END = """\
exit codes: 0 stopped by SIGINT (Ctrl-C), SIGTERM or SIGHUP · 130 the same while still starting · 1 failed while
starting or serving, for example because a rank died · 2 cannot be served as asked; nothing was started"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        if getattr(parsed, "what", None) in ("plans", "store"):
            return _bench_alone(parsed)
        if parsed.command in ("up", "down"):
            return _cluster(parsed)
        config = _config(parsed)
        if parsed.command == "check":
            return _check(config, parsed.json)
        if parsed.command == "bench":
            return _bench(config, parsed)
        return _serve(config)
    except PointsmanError as error:
        print(f"pointsman: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # whoever had started anything has taken it down
        print("pointsman: interrupted before it was ready", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pointsman",
        description="Serve a Mixture-of-Experts model over expert-parallel workers with a joint prefix store.",
        epilog="`pointsman COMMAND --help` lists the flags of a command. "
        "`pointsman serve` alone serves the bundled demo model on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("pointsman"))
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    _add_serve(commands)
    _add_check(commands)
    _add_bench(commands)
    _add_up(commands)
    _add_down(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "start a cell on this machine and serve the OpenAI API"
    serve = commands.add_parser(
        "serve",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, until Ctrl-C.",
        usage="pointsman serve [FLAG ...]",
        epilog=_SERVE_END,
        allow_abbrev=False,
    )
    add_settings(serve, SERVE_GROUPS)


def _add_check(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "does a model load, and what would each rank hold; starts nothing"
    check = commands.add_parser(
        "check",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. A directory with a config.json alone will do for all sizes. "
        "Exit code 2 if the model cannot be served; a host that is too small for it is only told.",
        usage="pointsman check [MODEL_DIR] [FLAG ...]",
        allow_abbrev=False,
    )
    check.add_argument(
        "model_dir",
        nargs="?",
        metavar="MODEL_DIR",
        help="as --model: checkpoint (default: the demo model)",
    )
    check.add_argument(
        "--json", type=Path, metavar="FILE", help="also write it as JSON (overwrites)"
    )
    add_settings(check, CHECK_GROUPS)


def _add_bench(commands: "argparse._SubParsersAction[_Parser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="measure this machine",
        description="Measure this machine. `pointsman bench WHAT --help` lists the flags.",
        usage="pointsman bench {control,idle,plans,prefix,store} [FLAG ...]",
        allow_abbrev=False,
    )
    kinds = bench.add_subparsers(
        prog="pointsman bench", dest="what", required=True, metavar="WHAT", title="what"
    )
    _add_bench_kind(kinds, "control", "a step's time outside the forward")
    _add_bench_kind(
        kinds, "idle", "CPU of an idle cell beside that of Ray with as many empty actors"
    )
    _add_bench_alone(kinds, "plans", "compiling, keeping and joining dispatch plans", ep_size=16)
    store = _add_bench_alone(
        kinds, "store", "matching and inserting, by the size of the prefix store", ep_size=4
    )
    _add_counts(
        store,
        ("--max-blocks", 1_000_000, "blocks of the largest store of long edges, which takes 2 GB"),
        ("--max-nodes", 1_000_000, "nodes of the largest store of short edges, which takes 5 GB"),
        ("--repeats", 500, "requests per size"),
    )
    _add_prefix_sizes(
        _add_bench_kind(
            kinds, "prefix", "time to first token by what is left of a prefix: KV, routes, nothing"
        )
    )


def _add_up(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "bring up the hosts of a cluster file of Ray and serve on them"
    command = commands.add_parser(
        "up",
        help=text,
        description=f"{text[0].upper()}{text[1:]}: `ray up`, a look at every host, `pointsman serve` on the head, "
        "until it is ready. Files that a flag names are files of the hosts.",
        usage="pointsman up FILE [FLAG of serve ...]",
        allow_abbrev=False,
    )
    command.add_argument("cluster_file", type=Path, metavar="FILE", help="as for `ray up`")
    command.add_argument(
        "serve_flags", nargs=argparse.REMAINDER, metavar="FLAG", help="see pointsman serve --help"
    )


def _add_down(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "end what `pointsman up` has started, on every host"
    command = commands.add_parser(
        "down",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, and look that nothing is left. May be repeated.",
        usage="pointsman down FILE [--drain-seconds SECONDS]",
        allow_abbrev=False,
    )
    command.add_argument("cluster_file", type=Path, metavar="FILE", help="as for `pointsman up`")
    command.add_argument(
        "--drain-seconds",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="what serves is killed when it has not ended after so long (default: 60)",
    )


def _add_bench_kind(
    kinds: "argparse._SubParsersAction[_Parser]", what: str, text: str
) -> argparse.ArgumentParser:
    kind = kinds.add_parser(
        what,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        usage=f"pointsman bench {what} [FLAG ...]",
        allow_abbrev=False,
    )
    kind.add_argument("--json", type=Path, metavar="FILE", help="also write JSON (overwrites)")
    add_settings(kind, CELL_GROUPS)
    return kind


def _add_bench_alone(
    kinds: "argparse._SubParsersAction[_Parser]", what: str, text: str, *, ep_size: int
) -> argparse.ArgumentParser:
    """A kind that needs no cell, and so no settings."""
    kind = kinds.add_parser(
        what,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        usage=f"pointsman bench {what} [FLAG ...]",
        allow_abbrev=False,
    )
    kind.add_argument("--json", type=Path, metavar="FILE", help="also write JSON (overwrites)")
    _add_counts(kind, ("--ep-size", ep_size, "ranks"))
    return kind


def _add_prefix_sizes(prefix: argparse.ArgumentParser) -> None:
    prefix.add_argument("--png", type=Path, metavar="FILE", help="also draw it (overwrites)")
    _add_counts(
        prefix,
        ("--prefix-tokens", 4000, "tokens of the prefix"),
        ("--tail-tokens", 32, "prompt tokens after it, never in the store"),
        ("--output-tokens", 32, "tokens to generate, greedily"),
        ("--repeats", 3, "how often each row is measured"),
    )


def _add_counts(parser: argparse.ArgumentParser, *flags: tuple[str, int, str]) -> None:
    for flag, default, text in flags:
        parser.add_argument(
            flag, type=int, metavar="N", default=default, help=f"{text} (default: {default})"
        )


def _config(parsed: argparse.Namespace) -> Config:
    flags = given(parsed)
    model_dir = getattr(parsed, "model_dir", None)
    if model_dir is not None:
        if "model.dir" in flags:
            raise ConfigError(
                f"MODEL_DIR {model_dir} and --model {flags['model.dir']} are one setting: give one"
            )
        flags["model.dir"] = model_dir
    _check_given(flags)
    settings = dict(parse_set(assignment) for assignment in parsed.set)
    return load_config(parsed.config, settings | flags)


def _check_given(flags: dict[str, Any]) -> None:
    """Refuses a flag whose value stands for "not given" in the settings: it would be ignored."""
    names = {flag.path: flag.name for flags in SERVE_GROUPS.values() for flag in flags}
    for path, value in flags.items():
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{names[path]} is empty: give a value, or leave the flag out")
        section, key = path.split(".")
        if value == 0 and getattr(getattr(Config(), section), key) == 0:
            raise ConfigError(f"{names[path]} 0: give at least 1, or leave the flag out")


def _check(config: Config, json_file: Path | None) -> int:
    from deploy.check import describe, table  # imports torch: two seconds that --help must not cost
    from deploy.planning import preview_cell

    check_writable(json_file)
    preview = preview_cell(config)
    _warn(preview.plan)
    print(table(preview))
    write_json(describe(preview), json_file)
    return 0


def _bench(config: Config, parsed: argparse.Namespace) -> int:
    set_ray_environment()
    check_writable(parsed.json)
    if parsed.what == "prefix":
        return _bench_prefix(config, parsed)
    from deploy.bench import control, idle  # as above
    from deploy.bench.report import markdown, report

    if parsed.what == "idle":
        rows = idle.run(config)
    else:
        ep_sizes = [config.cell.ep_size] if config.cell.ep_size else control.EP_SIZES
        rows = control.run(config, ep_sizes)
    print(markdown(rows))
    write_json(report(rows), parsed.json)
    return 0


def _bench_alone(parsed: argparse.Namespace) -> int:
    from deploy.bench import plans, store  # as above
    from deploy.bench.report import markdown, report

    check_writable(parsed.json)
    if parsed.what == "plans":
        rows = plans.run(parsed.ep_size)
    else:
        rows = store.run(parsed.ep_size, parsed.max_blocks, parsed.max_nodes, parsed.repeats)
    print(markdown(rows))
    write_json(report(rows), parsed.json)
    return 0


def _bench_prefix(config: Config, parsed: argparse.Namespace) -> int:
    from deploy.bench import chart, comparison, prefix  # as above
    from deploy.bench.report import markdown, report

    chart.check_drawable(parsed.png)
    sizes = prefix.PrefixSizes(
        parsed.prefix_tokens, parsed.tail_tokens, parsed.output_tokens, parsed.repeats
    )
    rows = prefix.run(config, sizes)
    print(markdown(rows))
    print(f"\n{comparison.sentence(rows)}")
    write_json(report(rows), parsed.json)
    chart.draw(rows, parsed.png)
    return 0


def _serve(config: Config) -> int:
    """Ray is imported late: it must find its environment set."""
    check_ray_authentication(os.environ)
    if config.cluster.address:
        set_joined_ray_environment(config.cluster.head_timeout_seconds)
        from deploy.joined_ray import JoinedRay
        from deploy.supervisor import serve

        return serve(config, JoinedRay(config))
    from deploy.planning import plan_cell

    plan = plan_cell(config)
    _warn(plan)
    set_ray_environment()
    from deploy.ground import OwnRay
    from deploy.supervisor import serve

    return serve(config, OwnRay(plan, config.http))


def _cluster(parsed: argparse.Namespace) -> int:
    from deploy.cluster_file import read_cluster_file  # up and down alone need YAML and ssh

    file = read_cluster_file(parsed.cluster_file)
    if parsed.command == "down":
        from deploy.cluster_down import down

        return down(file, parsed.drain_seconds)
    _check_serve_flags(parsed.serve_flags)
    from deploy.cluster_up import up

    try:
        return up(file, parsed.serve_flags)
    except KeyboardInterrupt:
        print(
            f"pointsman: interrupted; what was started goes on, pointsman down {file.path} ends it",
            file=sys.stderr,
        )
        return INTERRUPTED


def _check_serve_flags(flags: list[str]) -> None:
    """Now and not on a host in ten minutes. Raises ConfigError."""
    serve = _parser().parse_args(["serve", *flags])
    if serve.config is not None:
        raise ConfigError("--config: give its settings as flags, or by --set section.key=value")
    cluster = _config(serve).cluster
    if cluster.address or cluster.hosts or cluster.num_hosts:
        raise ConfigError(
            "--address, cluster.hosts and cluster.num_hosts follow from the cluster file: leave them out"
        )


def _warn(plan: CellPlan) -> None:
    for warning in plan.warnings:
        print(f"pointsman: warning: {warning}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
