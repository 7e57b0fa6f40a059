import sys
import textwrap
import time
from pathlib import Path

import psutil

from tests.clients.driven import Target, Told, drive
from tests.clients.environments import DRIVERS, Environment
from tests.helpers.served import eventually

TARGET = Target("http://127.0.0.1:9", "minnow", "sk-some", Path("/tokenizer"))


def told_by(directory: Path, code: str, seconds: float = 30.0, **variables: str) -> Told:
    script = directory / "driver.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(DRIVERS)!r})\n{textwrap.dedent(code)}")
    environment = Environment((sys.executable, str(script)), directory)
    return drive(environment, TARGET, seconds=seconds, variables=variables)


def test_each_check_is_told_also_those_after_one_that_failed(tmp_path: Path) -> None:
    told = told_by(
        tmp_path,
        """
        from checking import LeftOut, run_checks, same

        def right(server):
            same(server.api_key, "sk-some", "the key")

        def wrong(server):
            same(server.model, "trout", "the model")

        def impossible(server):
            raise LeftOut("no occasion")

        sys.exit(run_checks([("a", wrong), ("b", impossible), ("c", right)]))
        """,
    )
    assert told.checked == ("c",)
    assert told.failed == ("a: CheckFailed: the model is 'minnow' and should be 'trout'",)
    assert told.left_out == ("b: no occasion",)
    assert "Traceback" in told.output


def test_a_driver_that_ends_with_an_error_or_checks_nothing_has_failed(tmp_path: Path) -> None:
    assert told_by(tmp_path, "sys.exit(3)").failed == ("its driver ended with 3",)
    assert told_by(tmp_path, "print('checked a'); sys.exit(3)").failed != ()
    assert told_by(tmp_path, "print('all is well')").failed == ("its driver checked nothing",)
    assert told_by(tmp_path, "print('checked a')").failed == ()


def test_a_driver_over_its_deadline_has_failed_and_is_gone_with_what_it_started(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    told = told_by(
        tmp_path,
        """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        print("checked a\\nchild", child.pid, flush=True)
        child.wait()
        """,
        seconds=2.0,
    )
    assert time.monotonic() - began < 30.0
    assert told.checked == ("a",)
    assert told.failed == ("not done within 2 s",)
    pid = int(told.output.split()[-1])
    eventually(lambda: not _runs(pid), 10.0, "the end of what it started")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_driver_sees_none_of_the_users_own_settings(tmp_path: Path) -> None:
    told = told_by(
        tmp_path,
        "import os; print('checked', sorted(os.environ.keys() - {'LC_CTYPE'}))",
        EXTRA="1",
    )
    (names,) = told.checked
    assert "'EXTRA', 'HF_HUB_DISABLE_TELEMETRY', 'HF_HUB_OFFLINE'" in names
    assert "PYTHON" not in names
    assert "PYTEST" not in names


def test_a_command_that_fails_is_told_with_the_end_of_what_it_wrote(tmp_path: Path) -> None:
    told = told_by(
        tmp_path,
        """
        from pathlib import Path
        from checking import run_checks, same
        from commands import run_command

        def right(server):
            same(run_command("python", ["-c", "print(6 * 7)"], Path(".")), "42\\n", "its output")

        def wrong(server):
            run_command("python", ["-c", "print('too late'); raise SystemExit(3)"], Path("."))

        def slow(server):
            run_command("python", ["-c", "import time; time.sleep(60)"], Path("."), seconds=0.2)

        sys.exit(run_checks([("a", right), ("b", wrong), ("c", slow)]))
        """,
    )
    assert told.checked == ("a",)
    assert told.failed == (
        "b: CheckFailed: python ended with 3: too late",
        "c: CheckFailed: python was not done within 0.2 s",
    )
