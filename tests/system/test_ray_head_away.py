"""Ray's head is killed. On a host of its own, with its state in Redis, it is started again and the cell goes on; that
of a server's own Ray is not."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.helpers.hosts.cluster_files import PROGRAMS
from tests.helpers.hosts.desk import complete, pointsman_command
from tests.helpers.hosts.fleet import REPOSITORY, Fleet, fleet_of
from tests.helpers.hosts.host import Host
from tests.helpers.served import Served, eventually
from tests.integration.open_requests import OpenRequests, health

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="no redis-server: tests/system/packages.sh"
)
REDIS_PORT = 6390
PASSWORD = "told-to-nobody"
START_SECONDS = 120.0
"""Of Ray on a host, once more included."""
TOKENS = 300
END_SECONDS = 30.0


class Hosts:
    """A head without CPUs; engine, HTTP server and rank 0 beside each other; rank 1; where Redis runs and who asks."""

    def __init__(self, fleet: Fleet) -> None:
        self.head, self.front, self.other, self.desk = fleet.hosts
        for host in fleet.hosts:
            (host.home / ".ray").mkdir()
            (host.home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)

    def start_head(self) -> None:
        settings = f"RAY_REDIS_ADDRESS={self.desk.address}:{REDIS_PORT} RAY_external_storage_namespace=trial"
        flags = f"--head --port=6379 --include-dashboard=false --redis-password={PASSWORD}"
        _start_ray(self.head, settings, flags, num_cpus=0)

    def join(self, host: Host, num_cpus: int) -> None:
        _start_ray(host, "", f"--address={self.head.address}:6379", num_cpus)

    def kill_head(self) -> None:
        """All of Ray there at once, as a reboot does."""
        for process in self.head.processes():
            if process.name() != "sshd":
                process.kill()


def _start_ray(host: Host, settings: str, flags: str, num_cpus: int) -> None:
    command = (
        f"{settings} RAY_AUTH_MODE=token RAY_gcs_rpc_server_reconnect_timeout_s=300 PYTHONPATH={REPOSITORY} "
        f"{PROGRAMS}/ray start {flags} --node-ip-address={host.address} --num-cpus={num_cpus} "
        "--object-store-memory=100000000 --disable-usage-stats"
    )
    host.run(f"({command}) || ({command})", START_SECONDS)  # Ray gives itself 30 s


@contextmanager
def redis_on(host: Host) -> Iterator[None]:
    flags = f"--bind {host.address} --port {REDIS_PORT} --requirepass {PASSWORD}"
    command = ["redis-server", *flags.split(), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(host.entering(command), stdout=subprocess.DEVNULL) as redis:
        try:
            yield
        finally:
            redis.kill()


class Cell:
    """`pointsman serve` with two ranks on the front host."""

    def __init__(self, hosts: Hosts, fleet: Fleet) -> None:
        self._front = hosts.front
        self._desk = hosts.desk
        self._errors = fleet.directory / "serve.err"
        command = pointsman_command(
            hosts.front, *("serve", "--address", "auto", "--ep-size", "2", "--deterministic"),
            *("--host", hosts.front.address, "--num-kv-blocks", "128", "--max-model-len", "1024"),
            *("--set", "cluster.head_timeout_seconds=200", "--recovery-limit", "200"),
        )  # fmt: skip
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready.startswith("pointsman is ready: "), self.said()

    def said(self) -> str:
        return self._errors.read_text()

    def answer(self) -> str:
        body = complete(
            self._desk,
            f"http://{self._front.address}:8000",
            prompt="In the beginning",
            max_tokens=TOKENS,
        )
        return str(body["choices"][0]["text"])

    def stop(self) -> int:
        self._front.signal("pointsman serve", signal.SIGTERM)
        self.process.communicate(timeout=60.0)
        return self.process.returncode


@needs_redis
def test_a_cell_goes_on_without_rays_head_and_replaces_a_rank_when_it_is_back() -> None:
    with fleet_of(4) as fleet, ThreadPoolExecutor(2) as pool:
        hosts = Hosts(fleet)
        with redis_on(hosts.desk):
            hosts.start_head()
            list(pool.map(hosts.join, (hosts.front, hosts.other), (2, 1)))
            cell = Cell(hosts, fleet)
            undisturbed = cell.answer()

            flowing = pool.submit(cell.answer)
            hosts.kill_head()
            assert flowing.result(120.0) == undisturbed
            eventually(lambda: "Ray's head does not answer" in cell.said(), 30.0, "its line")
            assert cell.answer() == undisturbed

            hosts.other.signal("ExpertWorker", signal.SIGKILL)
            eventually(lambda: "rank lost rank=1" in cell.said(), 30.0, "the loss")
            waiting = pool.submit(cell.answer)
            hosts.start_head()
            assert waiting.result(120.0) == undisturbed
            assert cell.said().count("rank ready rank=1") == 2
            assert "Ray's head answers again" in cell.said()

            assert cell.stop() == 0, cell.said()
            eventually(lambda: not _actors(hosts), 20.0, "the end of its actors")


def _actors(hosts: Hosts) -> list[str]:
    return [
        line
        for host in (hosts.front, hosts.other)
        for line in host.run("ps -eo args").splitlines()
        if line.startswith(("ray::ExpertWorker", "ray::Engine", "ray::HttpServer"))
    ]


def test_without_rays_head_a_server_goes_on_for_a_while_and_then_ends_with_one_line() -> None:
    flags = ("--set", "cluster.head_timeout_seconds=5", "--drain-seconds", "1")
    with Served("--ep-size", "1", *flags) as served:
        served.wait_until_ready()
        requests = OpenRequests(served, num_streams=1)
        (head,) = [process for process in served.processes() if process.name() == "gcs_server"]
        head.kill()
        served.wait_for_stderr("Ray's head does not answer: requests go on", 15.0)
        assert health(served).status_code == 200
        assert served.wait(END_SECONDS) == 1
        served.assert_nothing_left()
        (end,) = requests.stream_ends(10.0)
        assert end.errors == [served.failure_lines[-1].removeprefix("pointsman: ")]
        assert "(cluster.head_timeout_seconds): the process gcs_server" in end.errors[0]
        assert "Traceback" not in served.stderr
