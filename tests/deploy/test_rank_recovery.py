"""Ranks die, hang and come back in every order: what the launcher asks of whom. Processes and time are the test's."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from cluster.messages import GroupWanted, Regroup, WeightsServed
from deploy.rank_recovery import DEATH_SECONDS, PULSE_SECONDS, SILENCE_SECONDS, RankRecovery

NUM_RANKS = 3
SILENT = tuple(range(NUM_RANKS))


@dataclass
class Processes:
    """What was asked for, by kind; `answers` and `failures` are of (kind, rank)."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    answers: dict[tuple[str, int], Any] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    model_dirs: list[str] = field(default_factory=list)
    let_go_of: dict[int, set[int]] = field(default_factory=dict)
    """By rank that lived: the lost ones, when it was asked last."""
    holding_on: set[int] = field(default_factory=set)
    """Ranks that do not answer that they have let go."""
    is_head_away: bool = False

    not_there: set[int] = field(default_factory=set)
    """Ranks for whose new process Ray has no room yet."""

    def can_replace(self) -> bool:
        return not self.is_head_away

    def start(self, rank: int) -> tuple[str, int]:
        self._ask("start", rank)
        return "be there", rank

    def kill(self, rank: int) -> None:
        self._ask("kill", rank)

    def let_go(self, rank: int, lost: Collection[int]) -> tuple[str, int]:
        self.let_go_of[rank] = set(lost)
        return "let go", rank

    def host_rendezvous(self, rank: int) -> tuple[str, int]:
        return self._ask("host", rank)

    def load(self, rank: int, model_dir: str) -> tuple[str, int]:
        self.model_dirs.append(model_dir)
        return self._ask("load", rank)

    def join(self, rank: int, address: str, port: int) -> tuple[str, int]:
        assert (address, port) == ("10.0.0.1", 29500)
        return self._ask("join", rank)

    def run(self, rank: int, generation: int, joined: Any) -> None:
        assert joined == f"rank {rank} joined"
        self._ask(f"run in {generation}", rank)

    def pulse(self, rank: int) -> tuple[str, int]:
        return self._ask("pulse", rank)

    def result(self, call: tuple[str, int]) -> tuple[bool, Any]:
        if call[0] == "let go":
            return call[1] not in self.holding_on, 1
        if call[0] == "be there":
            return call[1] not in self.not_there, True
        if call in self.answers:
            return True, self.answers[call]
        return False, self.failures.get(call)

    def _ask(self, what: str, rank: int) -> tuple[str, int]:
        self.asked.append((what, rank))
        return what, rank

    def take(self) -> list[tuple[str, int]]:
        asked, self.asked = self.asked, []
        return asked


@dataclass
class Engine:
    lost: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    groups: list[Regroup] = field(default_factory=list)
    wanted: list[GroupWanted] = field(default_factory=list)
    weights: WeightsServed = field(default_factory=lambda: WeightsServed("/weights/7", "seventh"))

    def rank_lost(self, rank: int, reason: str) -> None:
        self.lost.append(rank)
        self.reasons.append(reason)

    def regroup(self, regroup: Regroup) -> None:
        self.groups.append(regroup)

    def take_wanted(self) -> list[GroupWanted]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def want(self, generation: int, *silent: int) -> None:
        self.wanted.append(GroupWanted(generation, list(silent), "broken"))


class Cell:
    def __init__(self) -> None:
        self.processes, self.engine, self.now = Processes(), Engine(), 0.0
        self.recovery = RankRecovery(NUM_RANKS, self.processes, self.engine, clock=lambda: self.now)
        for rank in range(NUM_RANKS):
            self.processes.answers["load", rank] = True
            self.processes.answers["join", rank] = f"rank {rank} joined"
            self.processes.answers["host", rank] = ("10.0.0.1", 29500)

    def ticks(self, seconds: float = 0.0) -> list[tuple[str, int]]:
        """As many as change something, and what they asked for."""
        self.now += seconds
        for _ in range(5):
            self.recovery.tick()
        return self.processes.take()


def test_a_dead_rank_gets_a_new_process_and_all_meet_where_a_survivor_listens() -> None:
    cell = Cell()
    cell.recovery.lost(0, "SIGKILL")
    cell.engine.want(0)

    assert cell.ticks() == [("start", 0), ("load", 0), ("host", 1), ("join", 0), ("run in 1", 0)]
    assert cell.engine.lost == [0]
    assert cell.engine.groups == [Regroup(1, "10.0.0.1", 29500, {1: 0, 2: 0})]
    assert cell.processes.model_dirs == ["/weights/7"]
    assert not cell.recovery.is_under_way


def test_ranks_that_die_at_once_come_back_at_once_and_without_a_survivor_the_first_listens() -> (
    None
):
    cell = Cell()
    for rank in range(NUM_RANKS):
        cell.recovery.lost(rank, "SIGKILL")

    begun = [(what, rank) for rank in range(NUM_RANKS) for what in ("start", "load")]
    assert cell.ticks()[:7] == [*begun, ("host", 0)]
    assert cell.engine.groups[0].joining_ranks == {}
    assert not cell.recovery.is_under_way


def test_a_rank_that_dies_while_another_loads_begins_a_new_group_and_who_loads_goes_on() -> None:
    cell = Cell()
    del cell.processes.answers["load", 2]
    cell.recovery.lost(2, "SIGKILL")
    assert cell.ticks() == [("start", 2), ("load", 2), ("host", 0)]

    cell.recovery.lost(0, "SIGKILL")  # where all were to meet
    assert cell.ticks() == [("start", 0), ("load", 0), ("host", 1)]
    assert cell.processes.let_go_of[1] == {0}
    assert cell.engine.groups == []
    cell.processes.answers["load", 2] = True

    assert cell.ticks() == [("join", 0), ("join", 2), ("run in 1", 0), ("run in 1", 2)]
    assert cell.engine.groups == [Regroup(1, "10.0.0.1", 29500, {1: 0})]


def test_a_rank_that_dies_while_another_joins_begins_a_new_group_and_who_joined_begins_anew() -> (
    None
):
    cell = Cell()
    del cell.processes.answers["join", 2]
    cell.recovery.lost(2, "SIGKILL")
    assert cell.ticks() == [("start", 2), ("load", 2), ("host", 0), ("join", 2)]

    cell.recovery.lost(1, "SIGKILL")
    cell.processes.answers["join", 2] = "rank 2 joined"

    assert cell.ticks() == [
        ("kill", 2),
        *(("start", 1), ("load", 1), ("start", 2), ("load", 2), ("host", 0)),
        *(("join", 1), ("join", 2), ("run in 2", 1), ("run in 2", 2)),
    ]
    assert [group.generation for group in cell.engine.groups] == [1, 2]
    assert cell.engine.groups[1].joining_ranks == {0: 0}


def test_a_rank_that_dies_while_it_loads_costs_the_others_that_load_nothing() -> None:
    cell = Cell()
    for rank in (1, 2):
        del cell.processes.answers["load", rank]
        cell.recovery.lost(rank, "SIGKILL")
    cell.ticks()
    cell.processes.failures["load", 1] = "its process died"
    cell.recovery.tick()
    cell.processes.failures.clear()
    assert cell.ticks() == [("kill", 1), ("start", 1), ("load", 1), ("host", 0)]
    cell.processes.answers |= {("load", 1): True, ("load", 2): True}
    assert cell.ticks()[:2] == [("join", 1), ("join", 2)]


def test_an_engine_that_is_lost_while_a_rank_loads_costs_that_rank_nothing() -> None:
    cell = Cell()
    del cell.processes.answers["load", 2]
    cell.recovery.lost(2, "SIGKILL")
    cell.ticks()
    cell.recovery.engine_back()
    assert cell.ticks() == [("host", 0)]
    cell.processes.answers["load", 2] = True
    assert cell.ticks() == [("join", 2), ("run in 1", 2)]


def test_a_rank_that_has_loaded_what_is_not_served_any_more_loads_again_before_it_joins() -> None:
    cell = Cell()
    cell.recovery.lost(1, "SIGKILL")
    cell.recovery.tick()
    cell.engine.weights = WeightsServed("/weights/8", "eighth")
    assert cell.ticks() == [
        *(("start", 1), ("load", 1), ("host", 0), ("load", 1), ("join", 1), ("run in 1", 1)),
    ]
    assert cell.processes.model_dirs == ["/weights/7", "/weights/8"]


def test_a_rank_that_dies_before_anybody_was_told_where_to_meet_costs_no_further_process() -> None:
    cell = Cell()
    del cell.processes.answers["host", 0]
    cell.recovery.lost(2, "SIGKILL")
    assert cell.ticks() == [("start", 2), ("load", 2), ("host", 0)]

    cell.recovery.lost(0, "SIGKILL")

    assert cell.ticks() == [
        ("start", 0),
        ("load", 0),
        ("host", 1),
        ("join", 0),
        ("join", 2),
        ("run in 1", 0),
        ("run in 1", 2),
    ]


def test_a_process_that_cannot_load_is_replaced() -> None:
    cell = Cell()
    cell.processes.answers.pop(("load", 1))
    cell.processes.failures["load", 1] = "no memory"
    cell.recovery.lost(1, "SIGKILL")
    cell.recovery.tick()
    cell.recovery.tick()
    assert cell.processes.take() == [("start", 1), ("load", 1), ("host", 0), ("kill", 1)]
    assert cell.engine.lost == [1, 1]

    cell.processes.failures.clear()
    cell.processes.answers["load", 1] = True
    assert cell.ticks() == [("start", 1), ("load", 1), ("host", 0), ("join", 1), ("run in 1", 1)]


def test_a_rank_that_hangs_is_killed_and_the_others_are_not() -> None:
    cell = Cell()
    cell.engine.want(0, *SILENT)
    cell.processes.answers |= {("pulse", rank): True for rank in (0, 2)}
    assert cell.ticks() == [("pulse", 0), ("pulse", 1), ("pulse", 2)]
    assert cell.engine.lost == []

    assert cell.ticks(PULSE_SECONDS) == [
        ("kill", 1),
        *(("start", 1), ("load", 1), ("host", 0), ("join", 1), ("run in 1", 1)),
    ]
    assert cell.engine.lost == [1]
    assert cell.engine.reasons == ["it hung and was killed by this server: no sign of life for 3 s"]


def test_ranks_meet_only_when_all_that_lived_have_let_go_of_the_lost_one() -> None:
    cell = Cell()
    cell.processes.holding_on = {1}
    cell.recovery.lost(2, "its host died")
    assert cell.ticks() == [("start", 2), ("load", 2), ("host", 0)]
    assert cell.processes.let_go_of == {0: {2}, 1: {2}}
    assert cell.engine.groups == []

    cell.processes.holding_on.clear()

    assert cell.ticks() == [("join", 2), ("run in 1", 2)]
    assert cell.engine.groups == [Regroup(1, "10.0.0.1", 29500, {0: 0, 1: 0})]


def test_a_rank_that_does_not_let_go_in_time_is_lost_too() -> None:
    cell = Cell()
    cell.processes.holding_on = {0}
    cell.recovery.lost(2, "its host died")
    cell.ticks()
    assert cell.ticks(PULSE_SECONDS) == [
        ("kill", 0),
        ("start", 0),
        ("load", 0),
        ("host", 1),
        ("join", 0),
        ("join", 2),
        ("run in 1", 0),
        ("run in 1", 2),
    ]
    assert cell.processes.let_go_of[1] == {0}
    assert cell.engine.lost == [2, 0]


def test_a_process_that_waits_for_room_is_not_silent_and_one_that_hangs_while_it_loads_is() -> None:
    cell = Cell()
    cell.processes.not_there = {1}
    del cell.processes.answers["load", 1]
    cell.processes.answers |= {("pulse", rank): True for rank in (0, 2)}
    cell.recovery.lost(1, "its host died")
    cell.ticks()
    assert cell.ticks(SILENCE_SECONDS) == [("pulse", 0), ("pulse", 2)]
    assert cell.ticks(PULSE_SECONDS) == []

    cell.processes.not_there.clear()
    assert cell.ticks(2 * SILENCE_SECONDS) == [("pulse", 0), ("pulse", 1), ("pulse", 2)]
    assert ("start", 1) in cell.ticks(PULSE_SECONDS)
    assert cell.engine.lost == [1, 1]


def test_a_process_is_known_by_the_group_that_it_was_started_for() -> None:
    cell = Cell()
    for rank in (1, 2, 1):
        cell.recovery.lost(rank, "SIGKILL")
        cell.ticks()
    assert [group.joining_ranks for group in cell.engine.groups] == [
        {0: 0, 2: 0},
        {0: 0, 1: 1},
        {0: 0, 2: 2},
    ]


def test_a_rank_that_dies_while_rays_head_is_away_is_replaced_when_it_is_back() -> None:
    cell = Cell()
    cell.processes.is_head_away = True
    cell.recovery.lost(1, "SIGKILL")
    assert cell.ticks(100.0) == []
    assert cell.engine.lost == [1]
    assert cell.recovery.is_under_way

    cell.processes.is_head_away = False

    assert cell.ticks() == [("start", 1), ("load", 1), ("host", 0), ("join", 1), ("run in 1", 1)]


def test_a_rank_that_hangs_while_rays_head_is_away_is_killed_and_replaced_later() -> None:
    cell = Cell()
    cell.processes.is_head_away = True
    cell.engine.want(0, *SILENT)
    cell.processes.answers |= {("pulse", rank): True for rank in (0, 2)}
    cell.ticks()
    assert cell.ticks(PULSE_SECONDS) == [("kill", 1)]
    assert cell.ticks(100.0) == []

    cell.processes.is_head_away = False

    assert cell.ticks() == [("start", 1), ("load", 1), ("host", 0), ("join", 1), ("run in 1", 1)]


def test_ranks_that_all_live_meet_again_without_rays_head() -> None:
    cell = Cell()
    cell.processes.is_head_away = True
    cell.engine.want(0)
    assert cell.ticks(DEATH_SECONDS) == []
    assert cell.ticks(DEATH_SECONDS) == [("host", 0)]
    assert [group.generation for group in cell.engine.groups] == [1]


def test_silent_ranks_that_all_live_meet_again_as_they_are() -> None:
    cell = Cell()
    cell.engine.want(0, *SILENT)
    cell.processes.answers |= {("pulse", rank): True for rank in range(NUM_RANKS)}
    assert [what for what, _ in cell.ticks()] == ["pulse"] * 3
    assert cell.engine.groups == []
    assert cell.ticks(PULSE_SECONDS) == [("host", 0)]
    assert cell.engine.groups == [Regroup(1, "10.0.0.1", 29500, {0: 0, 1: 0, 2: 0})]
    assert not cell.recovery.is_under_way


def test_an_exchange_that_broke_waits_for_the_death_that_explains_it() -> None:
    cell = Cell()
    cell.engine.want(0)
    assert cell.ticks() == []
    assert cell.recovery.is_under_way
    cell.recovery.lost(2, "SIGKILL")
    assert cell.ticks() == [("start", 2), ("load", 2), ("host", 0), ("join", 2), ("run in 1", 2)]


def test_an_exchange_that_broke_with_nobody_dead_is_made_anew() -> None:
    cell = Cell()
    cell.engine.want(0)
    assert cell.ticks(DEATH_SECONDS / 2) == []
    assert cell.ticks(DEATH_SECONDS) == [("host", 0)]
    assert cell.engine.groups[0].joining_ranks == {0: 0, 1: 0, 2: 0}


def test_what_is_said_of_a_group_that_was_replaced_is_old_news() -> None:
    cell = Cell()
    cell.recovery.lost(1, "SIGKILL")
    cell.ticks()
    cell.engine.want(0)
    assert cell.ticks(DEATH_SECONDS) == []
    assert not cell.recovery.is_under_way


def test_a_group_that_does_not_come_together_is_replaced_by_another() -> None:
    cell = Cell()
    del cell.processes.answers["join", 1]
    cell.recovery.lost(1, "SIGKILL")
    cell.ticks()
    cell.engine.want(1)
    cell.recovery.tick()
    assert cell.processes.take() == [("kill", 1), ("start", 1), ("load", 1), ("host", 0)]
    cell.processes.answers["join", 1] = "rank 1 joined"
    assert cell.ticks() == [("join", 1), ("run in 2", 1)]


def test_a_host_of_the_rendezvous_that_hangs_is_replaced_and_another_is_asked() -> None:
    cell = Cell()
    host = cell.processes.answers.pop(("host", 0))
    cell.processes.answers |= {("pulse", rank): True for rank in (1, 2)}
    cell.processes.answers["host", 2] = host
    cell.recovery.lost(1, "SIGKILL")
    cell.ticks()
    assert cell.ticks(SILENCE_SECONDS) == [("pulse", 0), ("pulse", 1), ("pulse", 2)]
    assert cell.ticks(PULSE_SECONDS)[:4] == [("kill", 0), ("start", 0), ("load", 0), ("host", 2)]
    assert not cell.recovery.is_under_way
    assert cell.engine.lost == [1, 0]


def test_one_that_joins_with_weights_that_are_no_longer_served_does_not_serve() -> None:
    cell = Cell()
    joined = cell.processes.answers.pop(("join", 1))
    cell.recovery.lost(1, "SIGKILL")
    assert cell.ticks()[-1] == ("join", 1)
    cell.engine.weights = WeightsServed("/weights/8", "eighth")
    cell.processes.answers["join", 1] = joined
    assert cell.ticks() == [
        *(("kill", 1), ("start", 1), ("load", 1), ("host", 0), ("join", 1), ("run in 2", 1))
    ]
    assert cell.processes.model_dirs == ["/weights/7", "/weights/8"]
    assert cell.engine.lost == [1, 1]


def test_a_host_of_the_rendezvous_that_cannot_listen_is_asked_again() -> None:
    cell = Cell()
    cell.processes.answers.pop(("host", 0))
    cell.processes.failures["host", 0] = "no port"
    cell.recovery.lost(1, "SIGKILL")
    cell.recovery.tick()
    cell.recovery.tick()
    cell.processes.failures.clear()
    cell.processes.answers["host", 0] = ("10.0.0.1", 29500)
    assert cell.ticks(DEATH_SECONDS) == [
        ("start", 1),
        ("load", 1),
        ("host", 0),
        ("host", 0),
        ("join", 1),
        ("run in 1", 1),
    ]
