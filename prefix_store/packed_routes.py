"""Expert routes of a run of blocks as the tree keeps them: per block the bytes of its ids and of its weights.

Bytes cannot be written by anybody, a cut copies none of them, and a block that goes takes exactly its own along.
"""

from dataclasses import dataclass, field

import numpy as np

from cluster.routes import ExpertRoutes, RouteShape
from prefix_store.equal_parts import equal_parts


@dataclass(slots=True)
class PackedRoutes:
    """Both lists have one entry per block: [B, L, K] in C order, B tokens of a block, L MoE layers, K experts chosen.

    Mutable: the tree grows and cuts it with the blocks of a node.
    """

    topk_ids: list[bytes] = field(default_factory=list)
    topk_weights: list[bytes] = field(default_factory=list)

    @staticmethod
    def pack(routes: ExpertRoutes, num_blocks: int) -> "PackedRoutes":
        """A copy of routes of so many full blocks, [num_blocks · B, L, K]."""
        return PackedRoutes(
            equal_parts(routes.topk_ids, num_blocks),
            equal_parts(routes.topk_weights, num_blocks),
        )

    def __len__(self) -> int:
        return len(self.topk_ids)

    def part(self, start: int, end: int) -> "PackedRoutes":
        """Blocks [start, end); the bytes are shared. Does not mutate."""
        return PackedRoutes(self.topk_ids[start:end], self.topk_weights[start:end])

    def extend(self, other: "PackedRoutes") -> None:
        self.topk_ids += other.topk_ids
        self.topk_weights += other.topk_weights

    def take_head(self, num_blocks: int) -> "PackedRoutes":
        """Moves the first blocks into a run of their own."""
        head = self.part(0, num_blocks)
        del self.topk_ids[:num_blocks], self.topk_weights[:num_blocks]
        return head

    def drop_tail(self, num_blocks: int) -> None:
        start = len(self) - num_blocks
        del self.topk_ids[start:], self.topk_weights[start:]

    def num_equal(self, recorded: "PackedRoutes") -> int:
        """Leading blocks whose expert ids equal the recorded ones, of which there are at most as many."""
        pairs = zip(self.topk_ids, recorded.topk_ids, strict=False)
        return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(recorded))

    def unpack(self, shape: RouteShape) -> ExpertRoutes:
        """[n · B, L, K] of all blocks, a copy in memory that nobody can make writable; valid for ever."""
        dims = (-1, shape.num_moe_layers, shape.num_experts_per_tok)
        return ExpertRoutes(
            np.frombuffer(b"".join(self.topk_ids), shape.id_dtype).reshape(dims),
            np.frombuffer(b"".join(self.topk_weights), shape.weight_dtype).reshape(dims),
        )
