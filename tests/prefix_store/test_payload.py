"""All parts of a payload are cut at the same block."""

from cluster.types import BlockId, Rank
from prefix_store.payload import NodePayload
from tests.prefix_store.builders import packed, tokens


def test_taking_the_head_cuts_routes_and_kv_of_every_rank_at_the_same_block() -> None:
    sequence = tokens(16)
    long, short = [BlockId(b) for b in (7, 8, 9)], [BlockId(5)]
    tail = NodePayload(
        route_stamp=3,
        routes=packed(sequence, 0, 4),
        kv={Rank(0): long, Rank(1): short},
        kv_stamps={Rank(0): 1, Rank(1): 2},
    )

    head = tail.take_head(2)

    assert (head.routes, tail.routes) == (packed(sequence, 0, 2), packed(sequence, 2, 4))
    assert (head.kv, tail.kv) == ({0: [7, 8], 1: [5]}, {0: [9]})
    assert (head.kv_stamps, tail.kv_stamps) == ({0: 1, 1: 2}, {0: 1})
    assert (head.route_stamp, tail.route_stamp) == (3, 3)
