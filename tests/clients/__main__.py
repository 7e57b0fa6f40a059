"""`python -m tests.clients`: installs clients, drives them against a server, by default one of its own, and tells."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.own_server import ServerFailed, own_server
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.driven import Target, Told, drive
from tests.clients.environments import InstallFailed, ToolMissing, environment_of
from tests.clients.results import Result, Verdict, with_table

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
OWN_KEY = "sk-of-the-clients"
OWN_FLAGS = (
    *("--ep-size", "2", "--deterministic", "--reasoning-parser", "qwen3"),
    *("--set", "scheduler.max_num_waiting=100"),
)
"""Greedy answers that do not depend on neighbours, reasoning that is told apart though the demo model's template knows
none, and a queue that the most choices of one request overflow."""
NAMES = [client.name for client in CLIENTS]


def main() -> int:
    options = _parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.out is not None:
            with_table(options.out.read_text(), [], NAMES, "")  # before minutes are spent
        problems = _run(options)
    except (OSError, ValueError, ServerFailed) as error:
        print(f"clients: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"clients: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--url", help="a server that runs and is idle (default: start one)")
    parser.add_argument("--api-key", default="unused", help="for --url")
    parser.add_argument(
        "--tokenizer", type=Path, default=DEMO_MODEL, metavar="DIR", help="of the model at --url"
    )
    parser.add_argument(
        "--only", action="append", choices=NAMES, metavar="NAME", help=f"of: {' · '.join(NAMES)}"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="document that gets the table")
    parser.add_argument(
        "--keep", type=Path, default=Path(".clients"), metavar="DIR", help="for environments"
    )
    parser.add_argument("serve", nargs="*", metavar="ARG", help="after --: for `pointsman serve`")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> list[str]:
    """What went wrong: also what was left out on a server of one's own, which gives every occasion."""
    chosen = [client for client in CLIENTS if client.name in (options.only or NAMES)]
    results: list[Result] = []
    with _target(options) as target:
        for client in chosen:
            results.append(_result(client, target, options.keep))
            print(results[-1].row, flush=True)
            _write(results, target, options)
    return [
        f"{result.client}: {remark}"
        for result in results
        if result.verdict == "failed" or (result.verdict == "passed" and options.url is None)
        for remark in result.remarks
    ]


@contextmanager
def _target(options: argparse.Namespace) -> Iterator[Target]:
    """A server of one's own must hold nothing at the end."""
    if options.url is not None:
        model = _model_at(options.url, options.api_key)
        yield Target(options.url, model, options.api_key, options.tokenizer)
        return
    with tempfile.TemporaryDirectory(prefix="clients-") as directory:
        keys = Path(directory) / "keys"
        keys.write_text(OWN_KEY)
        keys.chmod(0o600)
        with own_server([*OWN_FLAGS, "--api-key-file", str(keys), *options.serve]) as server:
            model = _model_at(server.base_url, OWN_KEY)
            yield Target(server.base_url, model, OWN_KEY, options.tokenizer)
            server.wait_until_idle()
            server.evict_everything()
            if any(used := server.status().kv_blocks_used):
                raise ServerFailed(f"KV blocks {used} are held by nobody")


def _model_at(url: str, api_key: str) -> str:
    request = urllib.request.Request(
        f"{url}/v1/models", headers={"authorization": f"Bearer {api_key}"}
    )
    with urllib.request.urlopen(request, timeout=30.0) as answer:
        model: str = json.loads(answer.read())["data"][0]["id"]
        return model


def _result(client: Client, target: Target, root: Path) -> Result:
    print(f"{client.name} …", flush=True)
    try:
        environment = environment_of(client, root)
    except ToolMissing as reason:
        return Result(client.name, client.version, "not run", 0.0, (), (str(reason),))
    except InstallFailed as reason:
        return Result(client.name, client.version, "failed", 0.0, (), (str(reason),))
    began = time.monotonic()
    told = drive(
        environment, target, seconds=client.deadline_seconds, variables=dict(client.environment)
    )
    if told.failed:
        print(told.output, file=sys.stderr)
    return _result_of(client, told, time.monotonic() - began)


def _result_of(client: Client, told: Told, seconds: float) -> Result:
    remarks = (*told.failed, *(f"left out {reason}" for reason in told.left_out))
    verdict: Verdict = "failed" if told.failed else "passed"
    return Result(client.name, client.version, verdict, seconds, told.checked, remarks)


def _write(results: list[Result], target: Target, options: argparse.Namespace) -> None:
    """After each client, so that a run that is stopped has not been for nothing."""
    if options.out is not None:
        document = options.out.read_text()
        options.out.write_text(with_table(document, results, NAMES, _sentence(target, options)))


def _sentence(target: Target, options: argparse.Namespace) -> str:
    """Other work on the machine shows in the load average."""
    own = f"`pointsman serve {' '.join([*OWN_FLAGS, *options.serve])}`"
    return (
        f"Model {target.model}, {time.strftime('%Y-%m-%d')}, against "
        f"{'a server that ran' if options.url else own}; Python {sys.version.split()[0]}, {os.cpu_count()} cores, "
        f"load average at the end {os.getloadavg()[0]:.1f}."
    )


if __name__ == "__main__":
    sys.exit(main())
