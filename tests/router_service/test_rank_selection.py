from cluster.types import Rank
from router_service.rank_selection import REPLAY_COST, RankCandidate, select_home_rank


def make_candidate(rank: int, **fields) -> RankCandidate:
    defaults = {
        "num_kv_tokens": 0,
        "num_shared_replay": 0,
        "num_sharers": 1,
        "num_own": 10,
        "load": 0.0,
    }
    return RankCandidate(rank=Rank(rank), **(defaults | fields))


def test_the_rank_with_the_kv_wins_while_loads_are_equal() -> None:
    with_kv = make_candidate(1, num_kv_tokens=1000)
    without = make_candidate(0, num_shared_replay=1000)
    assert select_home_rank([without, with_kv]) is with_kv


def test_load_beats_the_kv_match_once_it_exceeds_the_replay() -> None:
    with_kv = make_candidate(1, num_kv_tokens=1000, load=1000 * REPLAY_COST + 1)
    without = make_candidate(0, num_shared_replay=1000)
    assert select_home_rank([without, with_kv]) is without


def test_a_replay_that_many_will_use_is_charged_to_all_of_them() -> None:
    with_kv = make_candidate(1, num_kv_tokens=1000, load=100.0)
    without = make_candidate(0, num_shared_replay=1000, num_sharers=10)
    assert select_home_rank([without, with_kv]) is without


def test_ties_go_to_the_longer_kv_match_then_to_the_lower_rank() -> None:
    longer = make_candidate(2, num_kv_tokens=16, num_own=10)
    shorter = make_candidate(0, num_kv_tokens=0, num_own=10)
    assert select_home_rank([shorter, longer]) is longer
    assert select_home_rank([make_candidate(1), make_candidate(0)]).rank == 0


def test_replaying_what_has_kv_costs_as_much_as_replaying_what_has_none_so_the_kv_decides() -> None:
    has_kv = make_candidate(1, num_kv_tokens=256, num_own_replay=256, num_own=20)
    has_routes = make_candidate(0, num_shared_replay=256, num_own=20)
    assert has_kv.cost == has_routes.cost
    assert select_home_rank([has_routes, has_kv]) is has_kv
