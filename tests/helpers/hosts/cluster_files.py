"""The cluster file that is shipped for own machines, made to fit a fleet: what is tested is what is documented."""

import sys
from pathlib import Path

from tests.helpers.hosts.fleet import REPOSITORY, Fleet
from tests.helpers.hosts.host import Host

SHIPPED = REPOSITORY / "deploy" / "ray" / "local.yaml"
PROGRAMS = Path(sys.executable).parent
FRONT_CPUS = 1
"""For engine and HTTP server, on the head."""


def write_cluster_file(
    fleet: Fleet, hosts: list[Host], *, ranks_per_host: int, name: str = "pointsman"
) -> Path:
    """The first host is the head. Every host shows as many CPUs as its ranks need."""
    addresses = ", ".join(host.address for host in hosts[1:])
    head, workers = SHIPPED.read_text().split("worker_start_ray_commands:")
    text = (
        _with_cpus(head, ranks_per_host + FRONT_CPUS)
        + "worker_start_ray_commands:"
        + _with_cpus(workers, ranks_per_host)
    )
    for shipped, here in (
        ("cluster_name: pointsman", f"cluster_name: {name}"),
        ("worker_ips: [10.0.0.2, 10.0.0.3, 10.0.0.4]", f"worker_ips: [{addresses}]"),
        ("10.0.0.1", hosts[0].address),
        ("ssh_user: ubuntu", "ssh_user: root"),
        ("~/.ssh/id_ed25519", str(fleet.key)),
        ("/opt/pointsman/.venv/bin", str(PROGRAMS)),
        ("--object-store-memory=200000000", "--object-store-memory=100000000"),
    ):
        assert shipped in text, f"{SHIPPED} has no {shipped!r} any more"
        text = text.replace(shipped, here)
    file = fleet.directory / f"{name}.yaml"
    file.write_text(text)
    for host in hosts:
        (host.home / ".bash_profile").write_text(f"export PYTHONPATH={REPOSITORY}\n")
    return file


def _with_cpus(commands: str, num_cpus: int) -> str:
    return commands.replace("ray start", f"ray start --num-cpus={num_cpus}")
