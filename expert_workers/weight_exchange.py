"""Other weights for a model that serves: read beside those in use, then copied over them on a word, or dropped.

The second share lies in the host's memory whatever the device is, so a GPU needs room for its weights only once.
Copying keeps every tensor where it is: nothing that was built of the weights has to be built again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.model_config.same_model import require_same_model
from cluster.model_spec import ComputeDtype, ModelSpec
from cluster.namespace import model_fingerprint
from expert_workers.host_memory import HostMemory, host_memory
from expert_workers.model.checkpoint import check_checkpoint
from expert_workers.model.weights import ModelWeights, WeightTarget, load_weights, weight_share


@dataclass(frozen=True)
class ShareRoom:
    """What a second share of the weights takes of the host's memory, and what that has."""

    needed_bytes: int
    memory: HostMemory


class WeightExchange:
    """Owner of a rank's weights: those that serve, and between `prepare` and `commit` or `discard` those that wait."""

    def __init__(
        self,
        served: ModelWeights,
        spec: ModelSpec,
        target: WeightTarget,
        dtype: ComputeDtype,
        *,
        memory: Callable[[], HostMemory] = host_memory,
    ) -> None:
        """target: of `served`."""
        self._served = served
        self._spec = spec
        self._beside = replace(target, device=torch.device("cpu"))
        self._dtype = dtype
        self._memory = memory
        self._prepared: tuple[ModelWeights, str] | None = None
        """And their fingerprint."""
        self.fingerprint: str | None = None
        """Of the weights that serve, once they are others than at the start."""

    def measure(self, model_dir: Path) -> ShareRoom:
        """Of this rank's share; whether all ranks of the host have room is somebody else's to say.

        Raises CheckpointError for a directory that is not the same model's.
        """
        self.discard()
        require_same_model(model_dir, self._spec)
        entries = check_checkpoint(model_dir, self._spec)
        experts = self._beside.placement.local_experts(self._beside.rank)
        share = weight_share(entries, map(int, experts), self._dtype)
        return ShareRoom(share.replicated_bytes + share.expert_bytes, self._memory())

    def prepare(self, model_dir: Path) -> str:
        """Reads this rank's share: its own experts and the replicated rest. Returns the fingerprint of the files, taken
        after they were read. What serves is not touched.

        Raises CheckpointError for a directory that is not the same model's or cannot be read.
        """
        self.discard()
        require_same_model(model_dir, self._spec)
        prepared = load_weights(model_dir, self._spec, self._beside)
        fingerprint = model_fingerprint(model_dir, self._dtype)
        self._prepared = prepared, fingerprint
        return fingerprint

    def commit(self) -> None:
        """What was prepared serves from now on."""
        assert self._prepared is not None, "commit before prepare"
        (prepared, fingerprint), self._prepared = self._prepared, None
        for served, other in zip(_tensors(self._served), _tensors(prepared), strict=True):
            served.copy_(other)
        self.fingerprint = fingerprint

    def discard(self) -> None:
        """Forgets what was prepared, if anything was."""
        self._prepared = None


def _tensors(weights: Any) -> Iterator[Tensor]:
    """All in a fixed order. Tied ones come twice."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from _tensors(part)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from _tensors(getattr(weights, field.name))
