"""The map of ranks as people read it."""

from cluster.rank_place import RankPlace
from deploy.rank_map import map_lines


def test_the_map_has_a_line_per_host_with_every_rank_and_its_device() -> None:
    places = {
        2: RankPlace("10.0.0.2", "cuda:0"),
        0: RankPlace("10.0.0.1", "cuda:0"),
        1: RankPlace("10.0.0.1", "cuda:1"),
    }
    assert map_lines(places) == [
        "host 10.0.0.1: rank 0 on cuda:0, rank 1 on cuda:1",
        "host 10.0.0.2: rank 2 on cuda:0",
    ]
