"""What a tree node carries for its blocks: routes of every block, KV block ids per rank, scores. No keys, no leases."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.types import BlockId, Rank
from prefix_store.packed_routes import PackedRoutes
from prefix_store.packed_scores import ScoreOffer


@dataclass(eq=False, slots=True)
class NodePayload:
    """Payload of a run of n blocks. The parts are cut together when the node is split.

        block     0    1    2    3
        routes   [r0] [r1] [r2] [r3]     every block, always
        kv[0]    [17] [ 4] [ 9]          a prefix of the blocks
        kv[1]    [ 2]                    a rank without KV has no entry
        scores   [s0]  -   [s2]  -       any of the blocks, also for some of a block's tokens

    What every block has grows in `add_blocks` and is cut in `take_head` and `drop_tail`, nowhere else.
    Stamps are logical times of the last use, one per part (and rank); larger is later.
    """

    route_stamp: int
    routes: PackedRoutes = field(default_factory=PackedRoutes)
    kv: dict[Rank, list[BlockId]] = field(default_factory=dict)
    kv_stamps: dict[Rank, int] = field(default_factory=dict)
    scores: dict[int, bytes] = field(default_factory=dict)
    """By block of the node, as packed_scores has them."""

    def num_kv_blocks(self, rank: Rank) -> int:
        return len(self.kv.get(rank, ()))

    @property
    def num_blocks_with_kv(self) -> int:
        """Blocks whose KV some rank holds; the blocks after them have routes only."""
        return max(map(len, self.kv.values())) if self.kv else 0

    def add_blocks(self, routes: PackedRoutes) -> None:
        """Blocks after the last one, without KV yet; mutates."""
        self.routes.extend(routes)

    def drop_tail(self, num_blocks: int) -> None:
        """Removes the last blocks, which have no KV; mutates."""
        self.routes.drop_tail(num_blocks)

    def take_head(self, num_blocks: int) -> "NodePayload":
        """Moves the first blocks into a payload of their own. Both keep the stamps."""
        head = NodePayload(self.route_stamp, self.routes.take_head(num_blocks))
        for rank, block_ids in list(self.kv.items()):
            head.kv[rank] = block_ids[:num_blocks]
            head.kv_stamps[rank] = self.kv_stamps[rank]
            del block_ids[:num_blocks]
            if not block_ids:
                del self.kv[rank], self.kv_stamps[rank]
        scores, self.scores = self.scores, {}
        for block, record in scores.items():
            part, place = (head, block) if block < num_blocks else (self, block - num_blocks)
            part.scores[place] = record
        return head

    def add_scores(self, offer: ScoreOffer, blocks: Sequence[int], first_block: int) -> int:
        """Takes an offer's scores of blocks that have none; mutates. Blocks are numbered as in the offer, in which
        this payload's start with `first_block`. Returns of how many tokens."""
        places = [block - first_block for block in blocks]
        self.scores.update(zip(places, offer.packed(blocks), strict=True))
        return offer.num_known(blocks)

    def merge_scores(self, offer: ScoreOffer, block: int, first_block: int) -> int:
        """Takes those that a block with scores does not have; mutates. Returns how many it took."""
        place = block - first_block
        self.scores[place], taken = offer.merged(self.scores[place], block)
        return taken
