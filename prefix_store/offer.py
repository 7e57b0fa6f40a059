"""What one `publish` offers to the tree, and whether its parts belong together. No tree in here."""

from dataclasses import dataclass

from cluster.errors import StoreError
from cluster.routes import ExpertRoutes, RouteShape
from cluster.types import BlockId, Rank
from prefix_store.radix_tree import BlockKeys


@dataclass(frozen=True)
class Offer:
    """Consecutive full blocks [first_block, end_block) of a sequence: KV on one rank, and the routes that made it."""

    keys: BlockKeys
    """Of the whole sequence."""
    rank: Rank
    first_block: int
    block_ids: list[BlockId]
    routes: ExpertRoutes
    """[num_blocks · B, L, K]: of every token of the blocks, B tokens each."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.block_ids)

    def ids_of(self, first_block: int, end_block: int) -> list[BlockId]:
        """KV block ids of some of the offered blocks, which are numbered from the start of the sequence."""
        return self.block_ids[first_block - self.first_block : end_block - self.first_block]

    def check(self, block_size: int, shape: RouteShape) -> None:
        """Raises StoreError if lengths, shapes or dtypes are not those of full blocks of this model."""
        ids, weights = self.routes.topk_ids, self.routes.topk_weights
        if len(ids) != self.num_blocks * block_size:
            raise StoreError(
                f"{self.num_blocks} blocks of {block_size} tokens with routes of {len(ids)} tokens: "
                "publish the routes of every token"
            )
        if self.first_block < 0 or self.end_block > len(self.keys):
            raise StoreError(
                f"blocks [{self.first_block}, {self.end_block}) of a sequence of {len(self.keys)} full "
                "blocks: publish full blocks only"
            )
        dims = (len(ids), shape.num_moe_layers, shape.num_experts_per_tok)
        if (ids.shape, ids.dtype, weights.dtype) != (dims, shape.id_dtype, shape.weight_dtype):
            raise StoreError(
                f"routes {ids.shape} {ids.dtype}/{weights.dtype}; this model's are "
                f"{dims} {shape.id_dtype}/{shape.weight_dtype}"
            )
