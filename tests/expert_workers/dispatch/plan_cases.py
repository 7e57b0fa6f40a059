"""Builders for plans: seeded routes on any placement, their fragments, and what negotiation would find out instead.

Letters: T tokens, L MoE layers, K experts per token, W ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.dispatch_plan import PlanFragment
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes, RouteShape
from cluster.types import Rank
from cluster.wire import Decoder, encode
from cluster.worker_messages import PlanPart, ToWorker
from expert_workers.dispatch.layout import (
    ExpertLocations,
    SentRows,
    expert_lookup,
    local_choices,
    sent_rows,
    wanted_rows,
)
from expert_workers.dispatch.planned import PlannedStep
from expert_workers.exchange.base import Exchange, RowSplits
from expert_workers.inputs_from_step import PlannedChunk
from expert_workers.model.experts import ExpertLayout
from expert_workers.plan_cache import PlanCache, PlanShape
from expert_workers.step_plan import LayerPlan, PlacedReceive, PlacedSend, join_parts
from prefix_store.plan_compiler import compile_fragment

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PlanCase:
    """routes: by source, then fragment by fragment; first_positions: of each fragment's first token in its sequence."""

    placement: ExpertPlacement
    shape: RouteShape
    routes: list[list[ExpertRoutes]]
    first_positions: list[list[int]]

    @property
    def ep_size(self) -> int:
        return self.placement.ep_size

    def routes_of(self, source: int) -> ExpertRoutes:
        """All its fragments' tokens, in order."""
        return ExpertRoutes.concatenate(self.routes[source], self.shape)

    def positions_of(self, source: int) -> npt.NDArray[np.int64]:
        """Of the same tokens."""
        runs = zip(self.first_positions[source], self.routes[source], strict=True)
        parts = [np.arange(first, first + run.num_tokens) for first, run in runs]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def fragments(self) -> list[list[PlanFragment]]:
        """By source."""
        return [
            [
                compile_fragment(run, Rank(source), self.placement, first_position=first)
                for run, first in zip(runs, self.first_positions[source], strict=True)
            ]
            for source, runs in enumerate(self.routes)
        ]

    def locations(self, source: int, moe_layer: int) -> ExpertLocations:
        """As the source's dispatcher finds them."""
        ids = torch.from_numpy(self.routes_of(source).topk_ids[:, moe_layer].astype(np.int64))
        positions = torch.from_numpy(self.positions_of(source))
        return expert_lookup(self.placement, CPU).locations(ids, positions)

    def pair_rows(self, moe_layer: int) -> npt.NDArray[np.int64]:
        """[W, W] rows from each source to each destination."""
        rows = [
            wanted_rows(self.locations(source, moe_layer).ranks, self.ep_size).sum(dim=1)
            for source in range(self.ep_size)
        ]
        return torch.stack(rows).numpy()


def make_routes(
    generator: np.random.Generator,
    num_tokens: int,
    shape: RouteShape,
    pool: npt.NDArray[np.integer] | None = None,
) -> ExpertRoutes:
    """Experts drawn from `pool`, of all by default."""
    pool = np.arange(shape.num_experts) if pool is None else pool
    dims = (num_tokens, shape.num_moe_layers, shape.num_experts_per_tok)
    order = generator.random((*dims[:2], len(pool))).argsort(axis=-1)
    ids = np.sort(pool[order[..., : dims[2]]], axis=-1)
    return ExpertRoutes(ids.astype(shape.id_dtype), generator.random(dims, dtype=np.float32))


def make_placement(
    generator: np.random.Generator, num_experts: int, ep_size: int
) -> ExpertPlacement:
    """In any order, with as many further copies as make the ranks even, or more."""
    num_copies = -num_experts % ep_size + ep_size * int(generator.integers(0, 3))
    copies = generator.integers(0, num_experts, num_copies)
    physical = generator.permutation(np.concatenate([np.arange(num_experts), copies]))
    return ExpertPlacement(0, ep_size, num_experts, physical.astype(np.int32))


def random_case(seed: int, ep_size: int | None = None) -> PlanCase:
    """Any number of ranks, experts (1 to 512), experts per token (1 to 8), layers, fragments and tokens, also none.

    In some cases only one rank's experts are chosen, or only the last ones; in some all tokens are one rank's.
    """
    generator = np.random.default_rng(seed)
    ep_size = int(generator.choice([1, 2, 3, 4, 8, 16])) if ep_size is None else ep_size
    num_experts = int(generator.choice([1, 2, 8, 17, 64, 256, 257, 512]))
    placement = make_placement(generator, num_experts, ep_size)
    pool = _pool(generator, placement)
    shape = RouteShape(
        num_moe_layers=int(generator.integers(1, 4)),
        num_experts_per_tok=int(generator.integers(1, min(len(pool), 8) + 1)),
        num_experts=num_experts,
    )
    routes = [
        [
            make_routes(generator, int(generator.choice([0, 1, 3, 12])), shape, pool)
            for _ in range(num_fragments)
        ]
        for num_fragments in _fragments_of_sources(generator, ep_size)
    ]
    first_positions = [generator.integers(0, 5000, len(runs)).tolist() for runs in routes]
    return PlanCase(placement, shape, routes, first_positions)


def even_case(
    seed: int,
    tokens_of_source: Sequence[Sequence[int]],
    *,
    num_experts: int = 16,
    k: int = 3,
    num_layers: int = 2,
) -> PlanCase:
    """On a contiguous placement; sizes of each source's fragments are given, which follow one another."""
    generator = np.random.default_rng(seed)
    placement = ExpertPlacement.contiguous(num_experts, len(tokens_of_source))
    shape = RouteShape(num_moe_layers=num_layers, num_experts_per_tok=k, num_experts=num_experts)
    routes = [[make_routes(generator, n, shape) for n in sizes] for sizes in tokens_of_source]
    first_positions = [
        (np.cumsum(sizes) - sizes).tolist() if sizes else [] for sizes in tokens_of_source
    ]
    return PlanCase(placement, shape, routes, first_positions)


def _pool(
    generator: np.random.Generator, placement: ExpertPlacement
) -> npt.NDArray[np.signedinteger]:
    kind = generator.integers(0, 4)
    if kind == 0:
        first_copies = placement.logical_to_physical_map[:, 0] // placement.num_physical_per_rank
        served = np.flatnonzero(first_copies == generator.integers(0, placement.ep_size))
        return served if len(served) else np.arange(placement.num_experts)
    if kind == 1:
        return np.arange(max(0, placement.num_experts - 8), placement.num_experts)
    return np.arange(placement.num_experts)


def _fragments_of_sources(generator: np.random.Generator, ep_size: int) -> list[int]:
    """0 to 3 each; in every fourth case one source has some and nobody else."""
    numbers: list[int] = generator.integers(0, 4, ep_size).tolist()
    if generator.integers(0, 4):
        return numbers
    source = generator.integers(0, ep_size)
    return [1 + number if rank == source else 0 for rank, number in enumerate(numbers)]


@dataclass(frozen=True)
class NegotiatedLayer:
    """What one rank's dispatcher and experts would have found out."""

    rows: SentRows
    splits: RowSplits
    layout: ExpertLayout


def negotiated_layers(case: PlanCase, moe_layer: int, min_group_rows: int) -> list[NegotiatedLayer]:
    """Of all ranks, computed in one place with the functions of negotiated dispatch."""
    sent, choices = [], []
    for source in range(case.ep_size):
        weights = torch.from_numpy(case.routes_of(source).topk_weights[:, moe_layer])
        locations = case.locations(source, moe_layer)
        wanted = wanted_rows(locations.ranks, case.ep_size)
        sent.append(sent_rows(wanted, int(wanted.sum())))
        choices.append(local_choices(locations, weights, sent[-1]))
    counts = case.pair_rows(moe_layer)
    layers = []
    for rank in range(case.ep_size):
        here = [rows.destinations == rank for rows in sent]
        layout = ExpertLayout.of(
            torch.cat([ids[mine] for (ids, _), mine in zip(choices, here, strict=True)]),
            torch.cat([weights[mine] for (_, weights), mine in zip(choices, here, strict=True)]),
            case.placement.num_physical_per_rank,
            min_group_rows,
        )
        splits = RowSplits(tuple(counts[rank].tolist()), tuple(counts[:, rank].tolist()))
        layers.append(NegotiatedLayer(sent[rank], splits, layout))
    return layers


def joined(case: PlanCase, rank: int) -> list[LayerPlan]:
    """One rank's plan of a step with all fragments of all sources."""
    fragments = case.fragments()
    sends, first_token = [], 0
    for fragment in fragments[rank]:
        sends.append(PlacedSend(fragment.send, first_token))
        first_token += fragment.num_tokens
    return join_parts(
        sends,
        [PlacedReceive(f.receive[rank], f.source) for of_source in fragments for f in of_source],
        num_layers=case.shape.num_moe_layers,
        num_experts=case.placement.num_physical_per_rank,
        ep_size=case.ep_size,
    )


def plan_part(fragment: PlanFragment, fragment_id: int, rank: int) -> PlanPart:
    """One rank's part, as it arrives there: through the wire."""
    message = PlanPart(
        fragment_id=fragment_id,
        digest=fragment.digest,
        source=fragment.source,
        placement_epoch=fragment.placement_epoch,
        num_tokens=fragment.num_tokens,
        send=fragment.send if rank == fragment.source else None,
        receive=fragment.receive[rank],
    )
    decoder: Decoder[ToWorker] = Decoder(ToWorker)
    decoded = decoder.decode(encode(message))
    assert isinstance(decoded, PlanPart)
    return decoded


def plan_shape(case: PlanCase, rank: int, min_group_rows: int = 1) -> PlanShape:
    return PlanShape(
        rank=rank,
        ep_size=case.ep_size,
        placement_epoch=case.placement.epoch,
        num_layers=case.shape.num_moe_layers,
        num_experts=case.placement.num_physical_per_rank,
        num_experts_per_tok=case.shape.num_experts_per_tok,
        min_group_rows=min_group_rows,
        device=CPU,
    )


def plan_step(
    case: PlanCase, rank: int, *, exchange: Exchange | None = None, min_group_rows: int = 1
) -> PlannedStep | None:
    """This rank's plan of a step in which every source has one chunk, made of all its fragments."""
    cache = PlanCache(plan_shape(case, rank, min_group_rows), exchange)
    chunks, next_id = [], 0
    for source, fragments in enumerate(case.fragments()):
        ids = range(next_id, next_id + len(fragments))
        next_id += len(fragments)
        for fragment_id, fragment in zip(ids, fragments, strict=True):
            cache.add(plan_part(fragment, fragment_id, rank))
        if fragments:
            num_tokens = sum(fragment.num_tokens for fragment in fragments)
            chunks.append(PlannedChunk(source, source, num_tokens, tuple(ids)))
    return cache.plan_step(0, chunks, has_dynamic=False)
