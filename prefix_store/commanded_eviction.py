"""Eviction by command: a part of everything that no request holds."""

from dataclasses import dataclass

from cluster.prefix_match import Eviction
from cluster.types import EvictTarget
from prefix_store.evictor import Evictor
from prefix_store.radix_tree import RadixNode, RadixTree


@dataclass(frozen=True)
class BlockBytes:
    """What one block takes in the parts of which all blocks take the same."""

    kv: int
    routes: int


def evict_part(tree: RadixTree, evictor: Evictor, part: EvictTarget, sizes: BlockBytes) -> Eviction:
    """Of every unleased node; mutates."""
    nodes = num_bytes = kept_leased = 0
    for node in tree.nodes_bottom_up():
        has_part = {"kv": bool(node.payload.kv), "scores": bool(node.payload.scores)}
        if not has_part.get(part, True):
            continue
        if node.num_leases:
            kept_leased += 1
            continue
        nodes += 1
        num_bytes += _evict_of(node, evictor, part, sizes)
    evictor.forget_stale()
    return Eviction(part, nodes, num_bytes, kept_leased)


def _evict_of(node: RadixNode, evictor: Evictor, part: EvictTarget, sizes: BlockBytes) -> int:
    """Returns the bytes that went."""
    num_bytes = 0
    if part != "kv":
        num_bytes += evictor.evict_scores(node, node.payload.score_bytes)
    if part == "scores":
        return num_bytes
    for rank in list(node.payload.kv):
        num_bytes += evictor.evict_kv(node, rank, node.num_blocks) * sizes.kv
    if part != "kv":
        num_bytes += evictor.evict_routes(node, node.num_blocks) * sizes.routes
    return num_bytes
