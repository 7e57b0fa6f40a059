"""What `pointsman up` and `down` run and make of the answers; the scripts run in a real bash, no host is needed."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import CellError, ConfigError, DeadlineError
from deploy.cli import main
from deploy.cluster_down import Stopped, check_all_stopped, stopped_of
from deploy.cluster_file import ClusterFile
from deploy.cluster_up import THE_HEAD, check_key, hosts_settings, refusals, result_in
from deploy.ray_environment import LAUNCHER_ENVIRONMENT
from deploy.remote import Answer, for_launcher, lines_of, on_head, on_host, ray_launcher, run
from deploy.remote_scripts import (
    LEFT_RUNNING,
    SERVES_ALREADY,
    follow_log,
    refuse_if_serving,
    serving_process,
    start_serving,
    stop_host,
    stop_serving,
)
from tests.helpers.served import eventually

FILE = ClusterFile(
    path=Path("c.yaml"),
    name="trial",
    provider="local",
    hosts=("10.0.0.1", "10.0.0.2"),
    num_hosts=2,
    ssh_user="me",
    ssh_key="/key",
    ssh_proxy_command=None,
    programs="",
    token_file=None,
)
CLOUD = replace(FILE, provider="aws", hosts=())
MAP = "host 10.0.0.1: rank 0 on cpu, rank 1 on cpu"
READY = "pointsman is ready: http://10.0.0.1:8000 (model minnow, admin http://127.0.0.1:8001)"


class Home:
    """A home folder with a `pointsman` of its own: a script that says a line and sleeps."""

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        (folder / "bin").mkdir()
        self.add("pointsman", program)

    def add(self, name: str, program: str) -> None:
        file = self._folder / "bin" / name
        file.write_text(f"#!/bin/bash\n{program}\n")
        file.chmod(0o755)

    @property
    def programs(self) -> str:
        return f"{self._folder}/bin/"

    def bash(self, script: str) -> Answer:
        environment = [f"HOME={self._folder}", f"PATH={os.environ['PATH']}"]
        return run(["env", "-i", *environment, "bash", "-c", script], 30.0)

    def first_line(self) -> str:
        """Of the log, as soon as it is there."""
        follow = ["env", f"HOME={self._folder}", "bash", "-c", follow_log("trial")]
        return next(iter(lines_of(follow, 20.0)))

    def log(self) -> str:
        return (self._folder / ".pointsman" / "trial" / "serve.log").read_text()


def expect_end(pid: int) -> None:
    """Of a process that was killed; the kernel may take a moment."""
    file = Path(f"/proc/{pid}/exe")
    eventually(lambda: not file.exists(), 10.0, f"the end of process {pid}")


SERVES = f"trap 'echo drained; exit 0' TERM; echo '{READY}' $*; while true; do sleep 0.05; done"


def test_what_serves_is_detached_followed_refused_a_second_time_and_drained(tmp_path: Path) -> None:
    home = Home(tmp_path, SERVES)
    start = start_serving("trial", home.programs, ["--ep-size", "2"])
    assert home.bash(start).code == 0
    assert home.first_line() == f"{READY} serve --ep-size 2"
    pid = int((tmp_path / ".pointsman" / "trial" / "serve.pid").read_text())
    again = home.bash(start)
    assert (again.code, serving_process(again.output)) == (SERVES_ALREADY, pid)
    assert serving_process(start) is None  # ray exec shows the script itself
    stopped = home.bash(stop_serving("trial", 20.0))
    assert (stopped.code, stopped.output) == (0, "")
    assert home.log().endswith("drained\n")
    assert home.bash(refuse_if_serving("trial")).code == 0
    assert home.bash(stop_serving("trial", 20.0)).code == 0


def test_what_serves_still_is_killed_before_the_last_of_ray_which_it_would_start_again(
    tmp_path: Path,
) -> None:
    """`ps` and `ray` are scripts: nobody looks at what runs on this machine."""
    home = Home(tmp_path, "")
    with subprocess.Popen(["sleep", "600"]) as serves:
        lives = f"[ -e /proc/{serves.pid}/exe ]"
        home.add(
            "ps",
            f"if {lives}; then echo {serves.pid} pointsman serve; fi\n"
            "if ! [ -e ~/ended ]; then echo 1 gcs_server; fi",
        )
        home.add(
            "ray",
            "if [[ $* != *--force ]]; then exit; fi\n"
            f"for _ in $(seq 50); do {lives} || {{ touch ~/ended; exit; }}; sleep 0.1; done",
        )
        try:
            stopped = home.bash(f"PATH={home.programs}:$PATH\n{stop_host('trial', home.programs)}")
            assert (stopped.code, stopped.output) == (0, "")
            assert serves.wait(10) == -signal.SIGKILL
        finally:
            serves.kill()


def test_what_does_not_drain_is_killed_and_that_is_told(tmp_path: Path) -> None:
    home = Home(tmp_path, "trap '' TERM; echo hangs; while true; do sleep 0.05; done")
    assert home.bash(start_serving("trial", home.programs, [])).code == 0
    assert home.first_line() == "hangs"
    pid = int((tmp_path / ".pointsman" / "trial" / "serve.pid").read_text())
    stopped = home.bash(stop_serving("trial", 0.2))
    assert stopped.output == "what served did not end within 0.2 s and was killed\n"
    expect_end(pid)


def test_a_process_that_got_the_number_since_is_left_alone(tmp_path: Path) -> None:
    home = Home(tmp_path, "exit 0")
    (tmp_path / ".pointsman" / "trial").mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as other:
        (tmp_path / ".pointsman" / "trial" / "serve.pid").write_text(str(other.pid))
        assert home.bash(stop_serving("trial", 1.0)).code == 0
        assert other.poll() is None
        other.kill()


def test_the_map_and_the_ready_line_are_the_result() -> None:
    assert result_in(["loading weights 100 %", MAP, READY, "more"]) == (MAP, READY)


def test_a_serve_that_ends_is_told_with_its_last_reason() -> None:
    lines = ["pointsman: host 10.0.0.2: Python 3.12 differs", "pointsman: warning: x", "bye"]
    with pytest.raises(
        CellError, match=r"^pointsman serve ended on the head: host 10\.0\.0\.2: Py"
    ):
        result_in(lines)


def test_lines_that_do_not_come_in_time_are_not_waited_for() -> None:
    with pytest.raises(DeadlineError):
        list(lines_of([sys.executable, "-c", "import time; time.sleep(60)"], 0.2))


def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid_file}; echo here; wait"
    assert next(iter(lines_of(["bash", "-c", script], 20.0))) == "here"
    expect_end(int(pid_file.read_text()))
    assert run(["bash", "-c", script], 2.0) == Answer(None, "here\n", "")
    expect_end(int(pid_file.read_text()))


def test_serve_is_told_to_wait_for_the_hosts_of_the_file() -> None:
    assert hosts_settings(FILE) == [
        *("--address", "auto"),
        *("--set", 'cluster.hosts=["10.0.0.1", "10.0.0.2"]'),
    ]


def test_own_machines_are_reached_by_ssh_and_a_clouds_head_by_ray() -> None:
    assert on_host(FILE, "10.0.0.2", "echo it's")[-2:] == [
        "me@10.0.0.2",
        "bash --login -c 'echo it'\"'\"'s'",
    ]
    assert on_head(CLOUD, "true")[-4:] == [
        "exec",
        "--no-config-cache",
        "c.yaml",
        "bash --login -c true",
    ]


@pytest.mark.parametrize("command", [on_head(CLOUD, "true"), ray_launcher("up"), for_launcher([])])
def test_whatever_is_rays_launcher_gets_what_it_reads_from_the_environment(
    command: list[str],
) -> None:
    settings = command[1 : 1 + len(LAUNCHER_ENVIRONMENT)]
    said = run(["env", "-i", *command[:1], *settings, "env"], 30.0).output
    assert set(said.splitlines()) == {f"{k}={v}" for k, v in LAUNCHER_ENVIRONMENT.items()}


def test_the_reason_of_ray_exec_stands_before_the_command_that_it_repeats() -> None:
    errors = (
        "a warning\nssh: connect to host 1.2.3.4 port 22: Connection refused\n"
        "Error: Command failed:\n\n  ssh -tt me@1.2.3.4 bash --login -c 'echo a\nexit 3'\n"
    )
    assert Answer(1, "", errors).reason == (
        "ssh: connect to host 1.2.3.4 port 22: Connection refused"
    )


def test_a_command_that_ended_without_a_reason_is_not_said_to_have_been_late() -> None:
    repeated = "Error: Command failed:\n\n  ssh -tt me@1.2.3.4 bash --login -c 'exit 3'\n"
    assert Answer(1, "", repeated).reason == "it ended with code 1"
    assert Answer(1, "Fetched IP: 1.2.3.4\r\nno such folder\r\n", repeated).reason == (
        "no such folder"
    )
    assert Answer(None, "", "").reason == "no answer in time"


# --- before `ray up`


def test_a_cell_that_serves_on_any_host_is_in_the_way_of_ray_up() -> None:
    answers = {
        "10.0.0.1": Answer(0, "", ""),
        "10.0.0.2": Answer(SERVES_ALREADY, "serves already, process 7\n", ""),
    }
    assert refusals(FILE, answers) == (
        "cluster trial serves already (process 7 on 10.0.0.2): pointsman down c.yaml first",
    )
    of_exec = Answer(1, "Fetched IP: 1.2.3.4\r\nserves already, process 7\r\n", "Error: failed")
    (line,) = refusals(CLOUD, {THE_HEAD: of_exec})
    assert line.startswith("cluster trial serves already (process 7 on the head)")
    (line,) = refusals(CLOUD, {THE_HEAD: Answer(1, "", "Error: no way\n")})
    assert line.startswith("the head: not reached by ssh: Error: no way; nothing was started")


def test_every_host_that_is_not_reached_is_named_before_ray_up() -> None:
    silent = Answer(255, "", "ssh: No route to host\n")
    answers = {"10.0.0.1": Answer(0, "", ""), "10.0.0.2": silent, "10.0.0.3": silent}
    (line,) = refusals(FILE, answers)
    assert line.startswith(
        "host 10.0.0.2: not reached by ssh: ssh: No route to host; host 10.0.0.3: not reached"
    )
    assert "nothing was started" in line


def test_hosts_on_which_nothing_serves_may_be_brought_up_again() -> None:
    assert refusals(FILE, dict.fromkeys(FILE.hosts, Answer(0, "", ""))) == ()


def test_a_key_that_is_not_there_is_refused_with_its_path(tmp_path: Path) -> None:
    key = tmp_path / "key"
    file = replace(FILE, ssh_key=str(key))
    with pytest.raises(ConfigError, match=rf"auth\.ssh_private_key {key}: no such file"):
        check_key(file)
    key.touch()
    check_key(file)
    check_key(replace(FILE, ssh_key=None))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(0, "", ""), None),
        (Answer(255, "", "ssh: No route to host\n"), "not reached: ssh: No route to host"),
        (
            Answer(LEFT_RUNNING, " 7 raylet\n 8 gcs_server\n", ""),
            "still runs 7 raylet; 8 gcs_server",
        ),
        (Answer(None, "", ""), "not stopped: no answer in time"),
    ],
)
def test_what_became_of_a_host_is_told(answer: Answer, problem: str | None) -> None:
    assert stopped_of("h", answer) == Stopped("h", problem)


def test_every_host_that_still_runs_something_is_in_the_error() -> None:
    results = [Stopped("a", "not reached: x"), Stopped("b", None), Stopped("c", "still runs 7 y")]
    with pytest.raises(CellError, match=r"^host a: not reached: x; host c: still runs 7 y$"):
        check_all_stopped(results)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep-size", "many"], "--ep-size"),
        (["--config", "x.toml"], "--config: give its settings as flags"),
        (["--address", "auto"], "--address, cluster.hosts and cluster.num_hosts follow from"),
    ],
)
def test_flags_of_serve_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "cluster_name: t\nprovider: {type: local, head_ip: h, worker_ips: []}\n"
        "head_start_ray_commands: [ray start --head]\n"
    )
    try:
        code = main(["up", str(file), *flags])
    except SystemExit as refused:
        code = int(str(refused.code))
    assert code == 2
    assert message in capsys.readouterr().err
