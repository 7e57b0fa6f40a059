"""The Ray actor `ExpertWorker`: one expert-parallel rank. Ray starts and watches it; steps come over ZeroMQ."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import ray.util

from cluster.channel_keys import PeerKeys
from cluster.log import configure_logging
from cluster.rank_place import RankPlace
from cluster.types import Rank
from deploy.cell_plan import CellPlan
from deploy.lost_hosts import end_connections_to
from expert_workers.device import detect_devices, rank_device, use_one_compute_thread
from expert_workers.ep_group import MEET_AGAIN_SECONDS, MEET_SECONDS, host_store
from expert_workers.worker import ExpertWorker as Worker
from expert_workers.worker_builder import (
    LoadedParts,
    WorkerOptions,
    load_rank,
    place_in_group,
)
from expert_workers.worker_loop import run_worker


@dataclass(frozen=True)
class LoadedRank:
    """Which process a rank is, and where."""

    pid: int
    place: RankPlace
    node_id: str
    """Of its host, in Ray."""


class ExpertWorker:
    """`run` occupies one thread of the actor until the cell ends."""

    def __init__(self, plan: CellPlan, rank: int, keys: PeerKeys) -> None:
        configure_logging()
        use_one_compute_thread()
        self._plan = plan
        self._keys = keys
        self._rank = Rank(rank)
        self._fraction = 0.0
        self._loaded: tuple[WorkerOptions, LoadedParts] | None = None
        """Until it is placed in a group."""
        self._worker: Worker | None = None

    def __repr__(self) -> str:
        """Ray puts it before every line that the process prints."""
        return f"ExpertWorker rank={self._rank}"

    def host_rendezvous(self, timeout_seconds: float) -> tuple[str, int]:
        """Where the ranks meet. The port is bound here before anybody is told."""
        address = _host_address()
        self._store = host_store(address, 0, timeout_seconds)
        return address, self._store.port

    def load(self, model_dir: str = "") -> bool:
        """Reads this rank's share of the weights, in place of what it had read. model_dir: if other weights are served
        by now."""
        plan = self._plan
        self._loaded = None
        options = WorkerOptions(
            model_dir=plan.model_dir,
            weights_dir=Path(model_dir) if model_dir else None,
            rank=self._rank,
            ep_size=plan.ep_size,
            dtype=plan.dtype,
            device=rank_device(detect_devices()),
            num_kv_blocks=plan.num_kv_blocks,
            block_size=plan.block_size,
            deterministic=plan.deterministic,
            dispatch=plan.dispatch,
            exchange=plan.exchange,
            host_address=_host_address(),
            store_address="",
            store_port=0,
            group_name=self._keys.shared_name(b"ep_group"),
            join_timeout_seconds=0.0,
            exchange_timeout_seconds=plan.exchange_timeout_seconds,
        )
        self._loaded = options, load_rank(options, self._note_progress)
        return True

    def load_and_join(
        self, store_address: str, store_port: int, timeout_seconds: float
    ) -> LoadedRank:
        """Where all ranks do so at once: at the start."""
        self.load()
        return self.join(store_address, store_port, timeout_seconds, MEET_SECONDS)

    def join(
        self,
        store_address: str,
        store_port: int,
        timeout_seconds: float,
        meet_timeout_seconds: float = MEET_AGAIN_SECONDS,
    ) -> LoadedRank:
        """The group that meets there, with what was loaded."""
        assert self._loaded is not None, "join before load"
        options, parts = self._loaded
        self._loaded = None
        where = replace(
            options,
            store_address=store_address,
            store_port=store_port,
            join_timeout_seconds=timeout_seconds,
            meet_timeout_seconds=meet_timeout_seconds,
        )
        self._worker = place_in_group(where, parts)
        return LoadedRank(os.getpid(), _place(), ray.get_runtime_context().get_node_id())

    def pulse(self) -> bool:
        """That the process lives, whatever its rank waits for."""
        return True

    def let_go(self, addresses: tuple[str, ...]) -> int:
        """Ends the connections to hosts that are gone, so that an exchange with a rank there breaks now."""
        return end_connections_to(addresses)

    def progress(self) -> float:
        """Fraction of this rank's weights that are loaded."""
        return self._fraction

    def run(
        self, engine_endpoint: str, route_endpoint: str, generation: int, engine_life: int
    ) -> None:
        assert self._worker is not None, "run before join"
        use_one_compute_thread()
        run_worker(
            self._worker,
            rank=self._rank,
            place=_place(),
            engine_endpoint=engine_endpoint,
            route_endpoint=route_endpoint,
            keys=self._keys,
            generation=generation,
            engine_life=engine_life,
        )

    def _note_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._fraction = done_bytes / max(1, total_bytes)


def _host_address() -> str:
    address: str = ray.util.get_node_ip_address()
    return address


def _place() -> RankPlace:
    gpus: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return RankPlace(_host_address(), f"cuda:{gpus[0]}" if gpus else "cpu")
