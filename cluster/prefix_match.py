"""What the engine and the prefix store tell each other. Plain values; the store owns everything behind them."""

from dataclasses import dataclass
from typing import Literal

from cluster.types import EvictTarget, Namespace


@dataclass(frozen=True)
class PrefixMatch:
    """How much of a prompt the store holds. Both lengths are multiples of the block size.

    Token order:   0 ............ num_kv_tokens[rank] ............ num_route_tokens ......... len(prompt)
                   KV and routes  |  routes only (replay)          |  unknown (the gate chooses)
    Invariant: num_kv_tokens[rank] ≤ num_route_tokens for every rank.
    Stale once the store has changed; `acquire` matches again.
    """

    namespace: Namespace
    num_route_tokens: int
    num_kv_tokens: tuple[int, ...]


@dataclass(eq=False)
class Lease:
    """Keeps the first `num_tokens` of a path from eviction, exactly. Made, grown and ended by the store; its holder
    only reads it and hands it back. Compared by identity."""

    namespace: Namespace
    num_tokens: int


PublishOutcome = Literal["added", "duplicate", "private"]
"""Of one block: taken by the tree; the tree had one on this rank (stays the caller's); refused (stays the caller's)."""


@dataclass(frozen=True)
class Publication:
    """Result of publishing consecutive full blocks.

    `conflict`: a block's expert ids differ from the recorded ones; it and all later ones are "private", and so must be
    every later block of that request.
    """

    outcomes: tuple[PublishOutcome, ...]
    conflict: bool


@dataclass(frozen=True)
class Eviction:
    """Result of an eviction by command."""

    part: EvictTarget
    nodes: int
    num_bytes: int
    kept_leased: int
    """Nodes that kept the part because a running request leases them."""


@dataclass(frozen=True)
class StoreStats:
    num_nodes: int
    kv_blocks_free: tuple[int, ...]
    """Per rank."""
    kv_blocks_used: tuple[int, ...]
    """Per rank: all that is not free."""
    kv_blocks_leased: int
    """Blocks of the tree that leases protect, over all ranks."""
    kv_bytes: int
    route_bytes: int
    score_bytes: int
    kv_blocks_evicted: int
    """Since start."""
    route_blocks_evicted: int
    """Since start."""
    score_blocks_evicted: int
    """Since start."""
    state: "StateOnDisk | None"
    """None: nothing is kept on disk."""


@dataclass(frozen=True)
class StateOnDisk:
    """What a store keeps in its state directory, and whether it can."""

    directory: str
    num_bytes: int
    """Of all files."""
    waiting_bytes: int
    """Of what was published and is not handed to the system yet."""
    snapshots: int
    """Completed since start."""
    runs_dropped: int
    """Published runs of blocks that were not written when they came, since start; the next snapshot has those that
    are still in the store."""
    blocks_loaded: int
    """At the start."""
    error: str
    """Why not all is on disk that should be; empty if it is."""

    @staticmethod
    def nothing() -> "StateOnDisk":
        """Of a directory that has just been made."""
        return StateOnDisk("", 0, 0, 0, 0, 0, "")
