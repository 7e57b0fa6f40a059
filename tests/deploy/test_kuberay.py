"""The manifests for KubeRay: required keys, none but those of its reference (1.6), and parts that fit each other. No
Kubernetes has seen them."""

import argparse
from pathlib import Path
from typing import Any

import yaml

from cluster.config import Config, load_config
from deploy.flags import SERVE_GROUPS, add_settings, given

FOLDER = Path(__file__).parents[2] / "deploy" / "kuberay"
CLUSTER_KEYS = {
    "rayVersion",
    "authOptions",
    "gcsFaultToleranceOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
STORAGE_KEYS = {"redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace"}
HEAD_KEYS = {"rayStartParams", "template", "serviceType"}
WORKER_KEYS = {
    "groupName",
    "replicas",
    "minReplicas",
    "maxReplicas",
    "rayStartParams",
    "template",
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    assert {"name", "image", "resources"} <= set(container)
    return dict(container)


def served(command: str) -> Config:
    """What `pointsman serve` makes of its flags."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_settings(parser, SERVE_GROUPS)
    parsed = parser.parse_args(command.split("pointsman serve ")[1].split())
    settings = dict(setting.split("=", 1) for setting in parsed.set)
    return load_config(None, given(parsed) | {key: int(value) for key, value in settings.items()})


def num_pods(cluster: dict[str, Any]) -> int:
    for group in cluster["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    return 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])


def test_the_job_has_the_keys_that_its_kinds_require() -> None:
    job, service = documents("rayjob")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert "rayStartParams" in group
        container_of(group)
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["groupName"]
    config = served(job["spec"]["entrypoint"])
    assert config.cluster.address == "auto"
    assert config.cluster.num_hosts == num_pods(cluster)
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    labels = cluster["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_cluster_has_required_keys_and_only_those_that_kuberay_knows() -> None:
    cluster, *services = documents("raycluster")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert set(spec) <= CLUSTER_KEYS
    assert spec["authOptions"] == {"mode": "token"}
    assert set(spec["gcsFaultToleranceOptions"]) <= STORAGE_KEYS
    assert spec["gcsFaultToleranceOptions"]["redisAddress"]
    assert set(spec["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]) == {"secretKeyRef"}
    assert {"rayStartParams", "template"} <= set(spec["headGroupSpec"]) <= HEAD_KEYS
    for group in spec["workerGroupSpecs"]:
        assert set(group) == WORKER_KEYS
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        params = group["rayStartParams"]
        assert all(isinstance(value, str) for value in params.values())
        mounts = {mount["name"] for mount in container_of(group)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert [(s["apiVersion"], s["kind"]) for s in services] == [("v1", "Service")] * 2


def test_every_container_of_the_cluster_starts_ray_as_kuberay_says() -> None:
    cluster, *_ = documents("raycluster")
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    head, front, gpus = _containers(cluster)
    for container in (head, gpus):
        assert container["command"] == ["/bin/bash", "-lc", "--"]
        assert container["args"] == ['ulimit -n 65536; eval "exec $KUBERAY_GEN_RAY_START_CMD"']
    (command,) = front["args"]
    assert 'eval "${KUBERAY_GEN_RAY_START_CMD//--block/}" && exec pointsman serve ' in command


def test_the_front_of_the_cluster_serves_what_probes_and_services_ask() -> None:
    cluster, http, admin = documents("raycluster")
    _, front, gpus = _containers(cluster)
    config = served(front["args"][0])
    assert config.cluster.address == "auto"
    assert config.cluster.num_hosts == num_pods(cluster["spec"])
    assert config.cluster.head_timeout_seconds < 600  # KubeRay lets Ray's processes wait so long
    group = cluster["spec"]["workerGroupSpecs"][1]
    per_pod = int(gpus["resources"]["limits"]["nvidia.com/gpu"])
    assert config.cell.ep_size == group["replicas"] * per_pod
    ports = {port["name"]: port["containerPort"] for port in front["ports"]}
    assert ports == {"http": config.http.port, "admin": config.http.admin_port}
    probes = {
        kind: front[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert probes["liveness"]["path"] == "/health/live"
    assert probes["readiness"]["path"] == probes["startup"]["path"] == "/health"
    pod = cluster["spec"]["workerGroupSpecs"][0]["template"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.http.drain_seconds
    for service, name in ((http, "http"), (admin, "admin")):
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        (port,) = service["spec"]["ports"]
        assert port["targetPort"] == name


def test_nothing_of_the_cluster_is_open_without_a_key() -> None:
    cluster, _, admin = documents("raycluster")
    head, front, _ = _containers(cluster)
    http = served(front["args"][0]).http
    mounts = {mount["name"]: mount["mountPath"] for mount in front["volumeMounts"]}
    for file in (http.api_key_file, http.admin_key_file):
        assert str(file).startswith(f"{mounts['keys']}/")
    pod = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (keys,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys"]
    assert keys["defaultMode"] & 0o007 == 0
    assert admin["spec"]["type"] == cluster["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    params = cluster["spec"]["headGroupSpec"]["rayStartParams"]
    assert params["dashboard-host"] == "127.0.0.1"
    assert "dashboard" not in {port["name"] for port in head["ports"]}


def _containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Of head, front and GPU pods."""
    spec = cluster["spec"]
    return [container_of(group) for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
