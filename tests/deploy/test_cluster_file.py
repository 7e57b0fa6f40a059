"""Cluster files: what pointsman reads of them, what it refuses, and the shipped ones against Ray's own schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import ray.autoscaler
import yaml

from cluster.errors import ConfigError
from deploy.cluster_file import ClusterFile, read_cluster_file

DEPLOY = Path(__file__).parents[2] / "deploy"
LOCAL = """\
cluster_name: trial
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
auth: {ssh_user: me, ssh_private_key: ~/key}
file_mounts: {~/.ray/auth_token: /tokens/one}
head_start_ray_commands: [/opt/p/bin/ray stop, RAY_AUTH_MODE=token /opt/p/bin/ray start --head]
"""


def read(tmp_path: Path, text: str) -> ClusterFile:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return read_cluster_file(file)


def test_a_file_of_own_machines_tells_hosts_login_programs_and_token(tmp_path: Path) -> None:
    assert read(tmp_path, LOCAL) == ClusterFile(
        path=tmp_path / "cluster.yaml",
        name="trial",
        provider="local",
        hosts=("10.0.0.1", "10.0.0.2", "10.0.0.3"),
        num_hosts=3,
        ssh_user="me",
        ssh_key="~/key",
        ssh_proxy_command=None,
        programs="/opt/p/bin/",
        token_file=Path("/tokens/one"),
    )


def test_programs_without_a_folder_are_on_the_path(tmp_path: Path) -> None:
    assert read(tmp_path, LOCAL.replace("/opt/p/bin/ray start", "ray start")).programs == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("10.0.0.3", "10.0.0.1"), "provider: 10.0.0.1 is listed more than once"),
        (("head_ip: 10.0.0.1, ", ""), "provider: head_ip, an address, and worker_ips"),
        (("head_ip", "external_head_ip: 1.2.3.4, head_ip"), "external_head_ip: not supported"),
        (("auth:", "min_workers: 1\nauth:"), "min_workers 1: all 2 worker_ips are waited for"),
        (("auth:", "max_workers: 0\nauth:"), "max_workers 0: all 2 worker_ips are waited for"),
        (("trial", "../x"), "cluster_name '../x': letters, digits"),
        (("ray start", "true"), "a command with `ray start` is expected"),
        (("provider: {", "docker: {image: x}\nprovider: {"), "docker: pointsman down stops no"),
        (("auth: {ssh_user: me, ssh_private_key: ~/key}", "auth: me"), "auth must be a mapping"),
        ((LOCAL, "- a\n- b"), "the file must be a mapping, got"),
        ((LOCAL, "a: [1"), "not a YAML file"),
    ],
)
def test_what_cannot_be_brought_up_is_refused_with_its_key(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, LOCAL.replace(*change))
    assert str(refused.value).startswith(f"{tmp_path}/cluster.yaml: ")
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster_file(tmp_path / "absent.yaml")


# --- the shipped ones


def ray_schema() -> Any:
    return json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.mark.parametrize("name", ["local", "aws-h100", "gcp-h100"])
def test_a_shipped_file_for_ray_up_fits_rays_schema(name: str) -> None:
    tree = yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text())
    jsonschema_rs.validate(ray_schema(), tree)


@pytest.mark.parametrize(("name", "num_hosts"), [("local", 4), ("aws-h100", 2), ("gcp-h100", 2)])
def test_a_shipped_file_is_one_that_pointsman_up_takes(name: str, num_hosts: int) -> None:
    file = read_cluster_file(DEPLOY / "ray" / f"{name}.yaml")
    assert file.num_hosts == num_hosts
    assert file.token_file == Path("~/.ray/auth_token").expanduser()
    assert file.programs.endswith("/bin/")


@pytest.mark.parametrize("name", ["local", "aws-h100", "gcp-h100"])
def test_a_shipped_file_starts_ray_with_token_authentication_everywhere(name: str) -> None:
    tree = yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [command for command in tree[key] if "ray start" in command]
        assert "RAY_AUTH_MODE=token" in start


@pytest.mark.parametrize("name", ["local", "aws-h100", "gcp-h100"])
def test_with_a_shipped_file_ray_gives_a_silent_host_up_after_seconds(name: str) -> None:
    tree = yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text())
    (start,) = [command for command in tree["head_start_ray_commands"] if "ray start" in command]
    period, timeout, misses = (
        int(start.split(f"RAY_health_check_{name}=")[1].split()[0].rstrip(";"))
        for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert (period + timeout) * misses <= 12_000


@pytest.mark.parametrize(
    "name", ["ray/aws-h100", "ray/gcp-h100", "kuberay/rayjob", "kuberay/raycluster"]
)
def test_a_shipped_file_that_nobody_has_run_says_so(name: str) -> None:
    assert "# NOT RUN" in (DEPLOY / f"{name}.yaml").read_text()
