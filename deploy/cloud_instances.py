"""Which instances of a cluster a cloud lists. A process of its own asks: libraries of clouds have no deadline."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from cluster.errors import CellError
from deploy import remote
from deploy.cluster_file import ClusterFile

LIST_SECONDS = 120.0
_KIND = "ray-node-type"
_FOUND = "instances: "


@dataclass(frozen=True)
class Instances:
    """By the cloud's names, pending or running; those that are shutting down are not among them."""

    heads: tuple[str, ...]
    workers: tuple[str, ...]

    def __str__(self) -> str:
        heads = [f"head {name}" for name in self.heads]
        return ", ".join(heads + [f"worker {name}" for name in self.workers])


class Lists(Protocol):
    """Of Ray's node providers."""

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> Sequence[str]: ...


def listed_instances(file: ClusterFile) -> Instances:
    """Raises CellError when the cloud does not tell: its library or credentials are missing, or the network."""
    asking = [sys.executable, "-m", "deploy.cloud_instances", str(file.path)]
    return instances_in(file, remote.run(remote.for_launcher(asking), LIST_SECONDS))


def instances_in(file: ClusterFile, answer: remote.Answer) -> Instances:
    told = [line for line in answer.output.splitlines() if line.startswith(_FOUND)]
    if answer.code != 0 or not told:
        raise CellError(
            f"the {file.provider} provider does not tell which instances cluster {file.name} has: {answer.reason}"
        )
    found = json.loads(told[-1].removeprefix(_FOUND))
    return Instances(tuple(found["heads"]), tuple(found["workers"]))


def line_of(provider: Lists) -> str:
    heads, workers = (
        list(provider.non_terminated_nodes({_KIND: kind})) for kind in ("head", "worker")
    )
    return _FOUND + json.dumps({"heads": heads, "workers": workers})


def main(path: str) -> int:
    """Of the process that asks."""
    # here, because the process that reads the answer needs none of it
    from ray.autoscaler._private.providers import _get_node_provider

    tree = yaml.safe_load(Path(path).read_text())
    try:
        line = line_of(_get_node_provider(tree["provider"], tree["cluster_name"]))
    except (
        Exception
    ) as error:  # of the cloud's library; an empty one of Ray has told its reason before
        if reason := str(error).strip():
            print(f"{type(error).__name__}: {reason.splitlines()[0]}", file=sys.stderr)
        return 1
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
