"""When blocks may be published under a lease, and how many routes a store must have room for: pure rules."""

from cluster.errors import ConfigError, StoreError
from cluster.prefix_match import PublishOutcome
from prefix_store.lease import LeasedPath
from prefix_store.offer import Offer
from prefix_store.radix_tree import BlockKeys, path_from_root


def check_sequence(path: LeasedPath, keys: BlockKeys) -> None:
    """Raises StoreError if the lease's last block is not the sequence's; the earlier ones are its holder's word."""
    node = path.end_node
    last = keys.run(node.end_block - 1, node.end_block)
    if node.parent is not None and not node.edge.endswith(last):
        raise StoreError(
            f"token ids differ from those of the lease in block {node.end_block - 1}: publish the "
            "sequence that was acquired"
        )


def may_publish(path: LeasedPath, offer: Offer) -> bool:
    """Whether everything before the offered blocks is leased, has KV on the rank and is this sequence's own."""
    if path.conflicted or offer.first_block > path.end_block:
        return False
    if offer.first_block == 0:
        return True
    before = path_from_root(path.end_node, offer.first_block - 1)[0]
    return before.first_block + before.payload.num_kv_blocks(offer.rank) >= offer.first_block


def private(num_blocks: int) -> tuple[PublishOutcome, ...]:
    outcome: PublishOutcome = "private"
    return (outcome,) * num_blocks


def check_route_budget(num_kv_blocks: int, block_bytes: int, budget_bytes: int) -> None:
    needed = num_kv_blocks * block_bytes
    if budget_bytes < needed:
        raise ConfigError(
            f"route memory of {budget_bytes} bytes is less than the {needed} bytes that the routes of "
            f"{num_kv_blocks} KV blocks take ({block_bytes} bytes each): raise --route-memory to at "
            f"least {needed} or lower --num-kv-blocks"
        )
