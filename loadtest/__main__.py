"""`python -m loadtest`: locust for a minute against a server, by default one of its own; its table into a document."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.answer import TokenCounts
from loadtest.locust_run import run_locust
from loadtest.own_server import OwnServer, ServerFailed, own_server
from loadtest.report import LoadReport, to_json, to_markdown, with_results


@dataclass(frozen=True)
class Run:
    """`problems` is empty when nothing failed; `remarks` belong into the document."""

    report: LoadReport
    remarks: Sequence[str]
    problems: Sequence[str]


def main() -> int:
    options = _parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.out is not None:
            with_results(options.out.read_text(), "")  # before a minute is spent
        run = _run(options)
        _write(run, options)
    except (OSError, ValueError, ServerFailed, subprocess.SubprocessError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 1
    for problem in run.problems:
        print(f"loadtest: {problem}", file=sys.stderr)
    return 1 if run.problems else 0


def _write(run: Run, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_bytes(to_json(run.report))
    if options.out is not None:
        parts = (_sentence(run.report, options), to_markdown(run.report), *run.remarks)
        document = options.out.read_text()
        options.out.write_text(with_results(document, "\n\n".join(p.strip() for p in parts)))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--host", metavar="URL", help="a server that runs (default: start one)")
    parser.add_argument("--seconds", type=int, default=60, metavar="N")
    parser.add_argument("--users", type=int, default=8, metavar="N", help="half of either kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results")
    parser.add_argument("--out", type=Path, metavar="FILE", help="document that gets the tables")
    parser.add_argument("serve", nargs="*", metavar="ARG", help="after --: for `pointsman serve`")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> Run:
    if options.host is not None:
        report = run_locust(options.host, users=options.users, seconds=options.seconds)
        return Run(report, (), _failures(report))
    with own_server(options.serve) as server:
        before = server.status()
        report = run_locust(server.base_url, users=options.users, seconds=options.seconds)
        return _checked(report, server, sum(before.kv_blocks_used))


def _checked(report: LoadReport, server: OwnServer, used_before: int) -> Run:
    """With the server's own account: its tokens are the clients', and it holds nothing that cannot be evicted."""
    problems = _failures(report)
    used_after = sum(server.wait_until_idle().kv_blocks_used)
    counted = server.tokens()
    if counted != report.all_tokens:
        problems.append(f"the server counted {counted}, its clients {report.all_tokens}")
    server.evict_everything()
    used_at_last = sum(server.status().kv_blocks_used)
    if used_at_last:
        problems.append(f"{used_at_last} KV blocks are held by nobody")
    remarks = (
        f"The server's own account: {_counts(counted)}. KV blocks in use before the run {used_before}, "
        f"after it {used_after:,} (none leased), after evicting all {used_at_last}.",
    )
    return Run(report, remarks, problems)


def _counts(tokens: TokenCounts) -> str:
    return (
        f"{tokens.computed:,} tokens computed, {tokens.cached:,} cached, {tokens.replayed:,} replayed, "
        f"{tokens.generated:,} generated"
    )


def _failures(report: LoadReport) -> list[str]:
    if not report.rows:
        return ["no request was answered"]
    return [f"{count} × {message}" for message, count in report.errors.items()]


def _sentence(report: LoadReport, options: argparse.Namespace) -> str:
    """Other work on the machine shows in the load average."""
    own = f"`pointsman serve {' '.join(options.serve)}".rstrip() + "`"
    return (
        f"Model {report.model}, {report.num_users} users, {report.seconds:.0f} s against "
        f"{'a server that ran' if options.host else own}; {os.cpu_count()} cores, load average at the end "
        f"{os.getloadavg()[0]:.1f}."
    )


if __name__ == "__main__":
    sys.exit(main())
