"""locust as a process of its own, since it patches the standard library of the one that it is in."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.report import LoadReport, from_json

STOP_SECONDS = 120
"""For requests that run at the end; none is cut off, so that all tokens are counted."""
_GRACE_SECONDS = 60


def run_locust(
    host: str,
    *,
    users: int,
    seconds: int,
    locustfile: str = "locustfile.py",
    arguments: Sequence[str] = (),
) -> LoadReport:
    """One of this package's locustfiles, headless. Its output goes on; requests that failed are in the report.

    Raises subprocess.SubprocessError when there is no report, or locust says that something else went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as directory:
        file = Path(directory) / "report.json"
        command = [
            *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name(locustfile))),
            *("--headless", "--only-summary", "--host", host),
            *("--users", str(users), "--spawn-rate", str(users), "--run-time", f"{seconds}s"),
            *("--stop-timeout", str(STOP_SECONDS), "--report-file", str(file)),
            *arguments,
        ]
        ended = subprocess.run(
            command, check=False, timeout=seconds + STOP_SECONDS + _GRACE_SECONDS
        )
        report = from_json(file.read_bytes()) if file.exists() else None
    if report is None or (ended.returncode != 0 and not report.num_failures):
        raise subprocess.CalledProcessError(ended.returncode, command)
    return report
