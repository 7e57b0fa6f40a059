"""What a tree node carries for its blocks: routes of every block, KV block ids per rank, scores. No keys, no leases."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.scores import TokenScores
from cluster.types import BlockId, Rank
from prefix_store.packed_routes import PackedRoutes
from prefix_store.packed_scores import ScoreOffer, unpack


@dataclass(eq=False, slots=True)
class NodePayload:
    """Payload of a run of n blocks. The parts are cut together when the node is split.

        block     0    1    2    3
        routes   [r0] [r1] [r2] [r3]     every block, always
        kv[0]    [17] [ 4] [ 9]          a prefix of the blocks
        kv[1]    [ 2]                    a rank without KV has no entry
        scores   [s0]  -   [s2]  -       any of the blocks, also for some of a block's tokens
        further  [f0]  -    -    -       alternatives after the first, of blocks with scores

    What every block has grows in `add_blocks` and is cut in `take_head` and `drop_tail`, nowhere else.
    Stamps are logical times of the last use, one per part (and rank); larger is later.
    """

    route_stamp: int
    routes: PackedRoutes = field(default_factory=PackedRoutes)
    kv: dict[Rank, list[BlockId]] = field(default_factory=dict)
    kv_stamps: dict[Rank, int] = field(default_factory=dict)
    scores: dict[int, bytes] = field(default_factory=dict)
    """By block of the node, as packed_scores has them, and so the next."""
    further: dict[int, bytes] = field(default_factory=dict)
    score_bytes: int = 0
    """Of both."""

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
        head.scores, self.scores = _cut(self.scores, num_blocks)
        head.further, self.further = _cut(self.further, num_blocks)
        head.score_bytes = _num_bytes(head.scores) + _num_bytes(head.further)
        self.score_bytes -= head.score_bytes
        return head

    def add_scores(self, offer: ScoreOffer, blocks: Sequence[int], first_block: int) -> int:
        """Takes an offer's scores of blocks that have none; mutates. Blocks are numbered as in the offer, in which
        this payload's start with `first_block`. Returns of how many tokens."""
        places = [block - first_block for block in blocks]
        self.scores.update(zip(places, offer.packed(blocks), strict=True))
        if offer.num_further:
            self.further.update(zip(places, offer.further(blocks), strict=True))
        self.score_bytes += len(blocks) * offer.block_bytes
        return offer.num_known(blocks)

    def restore_scores(self, block: int, packed: bytes) -> None:
        """With one alternative of each token, of a block that has none; mutates."""
        self.scores[block] = packed
        self.score_bytes += len(packed)

    def scores_of(self, block: int) -> TokenScores:
        """Of a block that has some; a view that nobody can write."""
        return unpack(self.scores[block], self.further.get(block))

    def replace_scores(self, block: int, scores: TokenScores) -> None:
        """Of a block that has some: by others, which list as many alternatives or more; mutates."""
        self.scores[block] = scores.rows.tobytes()
        if scores.further is not None:
            self.score_bytes += scores.further.nbytes - len(self.further.get(block, b""))
            self.further[block] = scores.further.tobytes()

    def last_scored(self, num_bytes: int) -> list[int]:
        """Blocks with scores from the end, as many as have so many bytes, or all."""
        blocks = []
        for block in sorted(self.scores, reverse=True):
            if num_bytes <= 0:
                break
            num_bytes -= len(self.scores[block]) + len(self.further.get(block, b""))
            blocks.append(block)
        return blocks

    def drop_scores(self, blocks: Sequence[int]) -> int:
        """Of blocks that have some; mutates. Returns the bytes that went."""
        if not blocks:
            return 0
        scores = self.scores
        num_bytes = len(blocks) * len(scores[blocks[0]])
        for block in blocks:
            del scores[block]
        if self.further:
            num_bytes += sum(len(self.further.pop(block, b"")) for block in blocks)
        self.score_bytes -= num_bytes
        return num_bytes


def _cut(records: dict[int, bytes], num_blocks: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Those of the first blocks, and of the others, which are numbered anew."""
    head, tail = dict[int, bytes](), dict[int, bytes]()
    for block, record in records.items():
        if block < num_blocks:
            head[block] = record
        else:
            tail[block - num_blocks] = record
    return head, tail


def _num_bytes(records: dict[int, bytes]) -> int:
    return sum(map(len, records.values()))
