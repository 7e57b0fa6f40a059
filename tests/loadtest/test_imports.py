import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["workload", "trace_replay", "answer", "report", "own_server"])
def test_only_locustfiles_bring_locust_into_a_process(module: str) -> None:
    code = f"import sys, loadtest.{module}; sys.exit('gevent' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_test_runs_in_a_patched_process() -> None:
    assert "gevent" not in sys.modules
