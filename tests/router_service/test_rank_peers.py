"""Which of the processes that were started for a rank speaks for it."""

from cluster.rank_name import RankName
from router_service.rank_peers import RankPeers


def test_the_later_process_of_a_rank_speaks_for_it_and_the_earlier_one_no_more() -> None:
    peers = RankPeers()
    assert peers.takes(b"rank-1.0")
    assert peers.takes(b"rank-1.3")
    assert not peers.takes(b"rank-1.0")
    assert peers.name(1) == b"rank-1.3"
    assert peers.name(0) == b"rank-0.0"


def test_who_is_known_from_the_launcher_is_known_before_it_has_said_anything() -> None:
    peers = RankPeers()
    peers.know({0: 2})
    assert peers.name(0) == b"rank-0.2"
    assert not peers.takes(b"rank-0.1")


def test_a_name_that_is_none_is_nobodys() -> None:
    peers = RankPeers()
    assert not any(peers.takes(name) for name in (b"rank-1", b"rank-x.0", b"", b"rank-1.0\n"))
    assert RankName.read(bytes(RankName(7, 12))) == RankName(7, 12)
