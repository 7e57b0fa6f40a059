"""Builders with defaults for prefix-store tests: small stores, sequences, routes that are a function of the prefix."""

import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.prefix_match import Lease, Publication
from cluster.routes import ExpertRoutes, RouteShape
from cluster.scores import SCORE_BYTES
from cluster.types import BlockId, Namespace, Rank
from prefix_store.packed_routes import PackedRoutes
from prefix_store.store import PrefixStore

BLOCK_SIZE = 4
SHAPE = RouteShape(num_moe_layers=2, num_experts_per_tok=2, num_experts=8)
NAMESPACE = Namespace("tenant-a")
KV_BYTES_PER_BLOCK = 1000
RANK0, RANK1 = Rank(0), Rank(1)

TokenIds = npt.NDArray[np.int32]


def route_block_bytes(shape: RouteShape = SHAPE, block_size: int = BLOCK_SIZE) -> int:
    return block_size * shape.bytes_per_token


def make_store(
    *,
    num_ranks: int = 2,
    num_kv_blocks: int = 16,
    max_route_blocks: int | None = None,
    max_score_blocks: int = 0,
    shape: RouteShape = SHAPE,
    block_size: int = BLOCK_SIZE,
) -> PrefixStore:
    blocks = num_ranks * num_kv_blocks if max_route_blocks is None else max_route_blocks
    return PrefixStore(
        num_ranks=num_ranks,
        num_kv_blocks=num_kv_blocks,
        block_size=block_size,
        route_shape=shape,
        route_budget_bytes=blocks * route_block_bytes(shape, block_size),
        score_budget_bytes=max_score_blocks * block_size * SCORE_BYTES,
        kv_bytes_per_block=KV_BYTES_PER_BLOCK,
    )


def tokens(length: int, *, first: int = 0) -> TokenIds:
    """[length] int32: first, first + 1, …"""
    return np.arange(first, first + length, dtype=np.int32)


def branch(shared: int, own: int, *, first: int = 1000) -> TokenIds:
    """`shared` tokens of tokens(…), then `own` tokens that appear nowhere else."""
    return np.concatenate([tokens(shared), tokens(own, first=first)])


def gate(
    prefix: TokenIds, *, shape: RouteShape = SHAPE, block_size: int = BLOCK_SIZE, variant: int = 0
) -> ExpertRoutes:
    """Routes of the last block of a prefix; another variant differs in at least one id."""
    rng = np.random.default_rng(zlib.crc32(prefix.tobytes()))
    dims = (block_size, shape.num_moe_layers, shape.num_experts_per_tok)
    ids = rng.integers(0, shape.num_experts - 1, dims).astype(shape.id_dtype)
    ids[0, 0, 0] += variant
    return ExpertRoutes(ids, rng.random(dims).astype(shape.weight_dtype))


def gates(
    token_ids: TokenIds,
    first_block: int,
    end_block: int,
    *,
    shape: RouteShape = SHAPE,
    block_size: int = BLOCK_SIZE,
    variants: frozenset[int] = frozenset(),
) -> ExpertRoutes:
    """Routes of blocks [first_block, end_block) of a sequence; those in `variants` differ from the usual ones."""
    records = [
        gate(
            token_ids[: (block + 1) * block_size],
            shape=shape,
            block_size=block_size,
            variant=int(block in variants),
        )
        for block in range(first_block, end_block)
    ]
    return ExpertRoutes.concatenate(records, shape)


def packed(token_ids: TokenIds, first_block: int, end_block: int) -> PackedRoutes:
    return PackedRoutes.pack(gates(token_ids, first_block, end_block), end_block - first_block)


@dataclass
class Written:
    """A request that has computed and offered blocks of a sequence."""

    lease: Lease
    rank: Rank
    block_ids: list[BlockId]
    publication: Publication
    private: list[BlockId] = field(default_factory=list)


def write(
    store: PrefixStore,
    token_ids: TokenIds,
    *,
    rank: Rank = RANK0,
    namespace: Namespace = NAMESPACE,
    routes: ExpertRoutes | None = None,
    shape: RouteShape = SHAPE,
    block_size: int = BLOCK_SIZE,
) -> Written:
    """Acquires what has KV on the rank, computes all further full blocks, publishes them; still leased."""
    cached = store.match(namespace, token_ids).num_kv_tokens[rank]
    lease = store.acquire(namespace, token_ids, cached)
    first, end = cached // block_size, len(token_ids) // block_size
    block_ids = store.allocate(rank, end - first)
    assert block_ids is not None
    made = gates(token_ids, first, end, shape=shape, block_size=block_size)
    offered = made if routes is None else routes
    publication = store.publish(lease, rank, token_ids, first, block_ids, offered)
    pairs = zip(publication.outcomes, block_ids, strict=True)
    private = [block_id for outcome, block_id in pairs if outcome != "added"]
    return Written(lease, rank, block_ids, publication, private)


def finish(store: PrefixStore, written: Written) -> None:
    store.release(written.lease)
    store.free(written.rank, written.private)


def insert(
    store: PrefixStore,
    token_ids: TokenIds,
    *,
    rank: Rank = RANK0,
    namespace: Namespace = NAMESPACE,
) -> None:
    """A whole request, from arrival to its end."""
    finish(store, write(store, token_ids, rank=rank, namespace=namespace))
