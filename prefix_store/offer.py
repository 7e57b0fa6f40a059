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
    routes: list[ExpertRoutes]

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.block_ids)

    def check(self, block_size: int, shape: RouteShape) -> None:
        """Raises StoreError if lengths, shapes or dtypes are not those of full blocks of this model."""
        if len(self.routes) != len(self.block_ids):
            raise StoreError(
                f"{len(self.block_ids)} blocks with {len(self.routes)} route records: one each"
            )
        if self.first_block < 0 or self.end_block > len(self.keys):
            raise StoreError(
                f"blocks [{self.first_block}, {self.end_block}) of a sequence of {len(self.keys)} full "
                "blocks: publish full blocks only"
            )
        dims = (block_size, shape.num_moe_layers, shape.num_experts_per_tok)
        for routes in self.routes:
            ids, weights = routes.topk_ids, routes.topk_weights
            if (ids.shape, ids.dtype, weights.dtype) != (dims, shape.id_dtype, shape.weight_dtype):
                raise StoreError(
                    f"routes {ids.shape} {ids.dtype}/{weights.dtype} of one block; this model's are "
                    f"{dims} {shape.id_dtype}/{shape.weight_dtype}"
                )

    def num_equal(self, recorded: list[ExpertRoutes]) -> int:
        """Leading blocks whose expert ids equal the recorded ones."""
        pairs = zip(self.routes, recorded, strict=False)
        return next(
            (i for i, (mine, theirs) in enumerate(pairs) if not mine.same_ids(theirs)),
            len(recorded),
        )
