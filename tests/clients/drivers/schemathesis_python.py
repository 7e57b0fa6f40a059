"""schemathesis' own command on all of the served OpenAPI document: no server error, and answers are as described."""

import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from checking import Json, Server, run_checks, same, some
from commands import run_command
from questions import COMPLETION, COMPLETION_PATH

DOCUMENT = "/openapi.json"
RUN_SECONDS = 840.0
"""A minute or two on an idle machine."""
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


def whole_document(server: Server) -> None:
    """It ends with an error for whatever it finds. What it has sent is in its report."""
    wanted = server.settled(COMPLETION_PATH, **COMPLETION)["choices"]
    entries = requests_of(server)
    statuses = Counter(entry["response"]["status"] for entry in entries)
    print(f"{len(entries)} requests, by status {dict(sorted(statuses.items()))}")
    same([status for status in statuses if status >= 500], [], "server errors")
    some(statuses[200], "answers with 200")
    asked = {urlsplit(entry["request"]["url"]).path for entry in entries}
    same([path for path in described(server) if not is_among(path, asked)], [], "paths not asked")
    again = server.settled(COMPLETION_PATH, **COMPLETION)["choices"]
    same(again, wanted, "what a completion says after it")


def requests_of(server: Server) -> list[Json]:
    """With their answers, as an HTTP archive has them."""
    with tempfile.TemporaryDirectory(prefix="schemathesis-") as directory:
        report = Path(directory) / "requests.har"
        told = run_command(
            "schemathesis",
            [
                *("run", f"{server.url}{DOCUMENT}", "--seed", "1", "--no-color"),
                *("--header", f"Authorization: Bearer {server.api_key}"),
                *("--checks", ",".join(CHECKED), "--continue-on-failure"),
                *(
                    "--phases",
                    "coverage,fuzzing",
                    "--max-examples",
                    "5",
                    "--request-timeout",
                    "120",
                ),
                *("--report", "har", "--report-har-path", str(report)),
            ],
            Path(directory),
            variables={
                "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
                "PYTHONPATH": str(Path(__file__).parent),
            },
            seconds=RUN_SECONDS,
        )
        print(told)
        entries: list[Json] = json.loads(report.read_text())["log"]["entries"]
        return entries


def described(server: Server) -> list[str]:
    return list(server.get(DOCUMENT)["paths"])


def is_among(path: str, asked: set[str]) -> bool:
    """Also with something in the place of its parameters."""
    pattern = re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
    return any(pattern.fullmatch(one) for one in asked)


CHECKS = [("all paths, no server error", whole_document)]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
