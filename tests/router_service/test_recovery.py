"""Ranks are lost and come back, behind real sockets: the test is the launcher."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import pytest

from cluster.channel import DealerSocket, PushSocket
from cluster.messages import (
    CellStatus,
    EvictCommand,
    EvictReport,
    GroupWanted,
    LastRecovery,
    MetricsQuery,
    MetricsText,
    RankLost,
    Regroup,
    StatusQuery,
    Stop,
    ToLauncher,
    UpdateWeights,
    Watching,
    WeightsServed,
    WeightsUpdated,
)
from cluster.namespace import weight_version
from cluster.rank_name import RankName
from cluster.wire import Decoder, encode
from cluster.worker_messages import GroupBroken, RouteFrame
from router_service.engine_life import EngineLife
from router_service.suspects import BREAKS_RANKS
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_cell import PATIENCE, ContentCell
from tests.helpers.content_workers import SHAPE, oracle
from tests.helpers.other_weights import fingerprint_of
from tests.helpers.served import eventually

PROMPT = list(range(1, 30))
LONG = 60
T = TypeVar("T")
SECOND_LIFE = EngineLife(1)


class Launcher:
    """Its line to the engine."""

    def __init__(self, cell: ContentCell) -> None:
        self._socket = DealerSocket("launcher-1", KEYS.launcher)
        self._socket.connect(cell.service.client_endpoint)
        self._decoder: Decoder[ToLauncher] = Decoder(ToLauncher)
        self._cell = cell
        self.generation = 0
        self._socket.send(encode(Watching()))
        self._socket.send(encode(StatusQuery(1)))
        self.told(CellStatus)  # it knows of the launcher now

    def wanted(self) -> GroupWanted:
        return self.told(GroupWanted)

    def told(self, kind: type[T]) -> T:
        """The next thing that the engine says."""
        frame = self._socket.receive(PATIENCE)
        assert frame is not None, "the engine says nothing"
        message = self._decoder.decode(frame)
        assert isinstance(message, kind)
        return message

    def lost(self, rank: int) -> None:
        """It dies, too."""
        self._cell.ranks.hang_up(rank)
        self.tell_lost(rank)

    def tell_lost(self, rank: int) -> None:
        self._socket.send(encode(RankLost(rank, "SIGKILL")))

    def close(self) -> None:
        self._socket.close()

    def regroup(self, *joining: int) -> None:
        self.generation += 1
        self._socket.send(
            encode(Regroup(self.generation, "10.0.0.1", 29500, dict.fromkeys(joining, 0)))
        )


@contextmanager
def recovering_cell(
    *,
    recovery_limit_seconds: float = PATIENCE,
    step_timeout_seconds: float = PATIENCE,
    life: EngineLife | None = None,
) -> Iterator[tuple[ContentCell, Launcher]]:
    cell = ContentCell(
        recovery_limit_seconds=recovery_limit_seconds,
        step_timeout_seconds=step_timeout_seconds,
        life=life,
    )
    with cell:
        launcher = Launcher(cell)
        try:
            yield cell, launcher
        finally:
            launcher.close()


def start(cell: ContentCell) -> None:
    """Two streams, one on each rank, in the middle of their answers."""
    cell.client.submit("a", PROMPT, LONG)
    cell.client.submit("b", PROMPT[::-1], LONG)
    cell.client.wait_for_token("a")
    cell.client.wait_for_token("b")


def assert_whole(cell: ContentCell) -> None:
    cell.client.wait_for("a", "b")
    assert cell.client.tokens["a"] == oracle(PROMPT, LONG)[0]
    assert cell.client.tokens["b"] == oracle(PROMPT[::-1], LONG)[0]


def test_streams_go_on_token_for_token_when_a_rank_has_come_back() -> None:
    with recovering_cell() as (cell, launcher):
        start(cell)
        launcher.lost(1)
        wanted = launcher.wanted()
        assert (wanted.generation, wanted.silent_ranks) == (0, [])
        assert "rank 1" in wanted.reason
        status = cell.client.status()
        assert not status.ready
        assert status.reason.startswith("recovering: rank 1 is lost")
        cell.client.submit("late", PROMPT, 3)
        launcher.regroup(0)
        cell.ranks.come_back(1, 1)
        assert_whole(cell)
        cell.client.wait_for("late")
        assert cell.client.tokens["late"] == oracle(PROMPT, 3)[0]
        (group,) = cell.ranks.groups
        assert (group.generation, group.store_address, group.store_port) == (1, "10.0.0.1", 29500)
        assert 0 < group.timeout_seconds <= PATIENCE
        assert cell.client.status().ready


def test_a_group_that_breaks_while_it_comes_together_is_replaced_by_the_next() -> None:
    with recovering_cell() as (cell, launcher):
        start(cell)
        launcher.lost(1)
        launcher.wanted()
        launcher.regroup(0)
        launcher.lost(0)  # the survivor: all that is left are routes and tokens
        launcher.regroup()
        cell.ranks.come_back(0, 2)
        eventually(lambda: cell.ranks.have_come or None, PATIENCE, "rank 0")
        cell.ranks.come_back(1, 2)
        assert_whole(cell)


def test_ranks_that_could_not_join_are_told_to_the_launcher_once_more() -> None:
    with recovering_cell() as (cell, launcher):
        start(cell)
        launcher.lost(1)
        launcher.wanted()
        launcher.regroup(0)
        eventually(lambda: cell.ranks.groups or None, PATIENCE, "the order to join")
        other = DealerSocket(str(RankName(2)), KEYS.worker)
        other.connect(cell.service.worker_endpoint)
        other.send(encode(GroupBroken(1, 1, "rank 1 could not join the EP group")))
        wanted = launcher.wanted()
        assert wanted.generation == 1
        assert "could not join" in wanted.reason
        launcher.regroup(0)
        cell.ranks.come_back(1, 2)
        assert_whole(cell)
        other.close()


def test_silent_ranks_are_named_to_the_launcher_and_the_same_processes_can_go_on() -> None:
    with recovering_cell(step_timeout_seconds=0.5) as (cell, launcher):
        start(cell)
        cell.ranks.may_answer.clear()
        wanted = launcher.wanted()
        assert wanted.silent_ranks == [0, 1]
        cell.ranks.may_answer.set()
        launcher.regroup(0, 1)
        assert_whole(cell)
        assert cell.store.stats().kv_bytes > 0


def test_what_is_not_made_good_in_time_ends_every_request_with_both_reasons() -> None:
    with recovering_cell(recovery_limit_seconds=0.5) as (cell, launcher):
        start(cell)
        launcher.lost(1)
        launcher.wanted()
        launcher.regroup(0)
        cell.client.wait_for("a", "b")
        error = cell.client.completions["a"].error
        assert error is not None
        assert error.startswith("rank 1 is lost")
        assert "not made good within 0.5 s (--recovery-limit): rank 1 did not join group 1" in error


def test_a_rank_for_which_no_process_came_in_time_is_named() -> None:
    with recovering_cell(recovery_limit_seconds=0.5) as (cell, launcher):
        cell.ranks.may_answer.clear()
        cell.client.submit("a", PROMPT, LONG)
        assert cell.ranks.in_step.wait(PATIENCE)
        launcher.tell_lost(1)
        cell.client.wait_for("a")
        error = cell.client.completions["a"].error
        assert error is not None
        assert error.endswith("within 0.5 s (--recovery-limit): rank 1 did not come back")


def test_a_rank_lost_while_idle_comes_back_and_commands_wait_for_it() -> None:
    with recovering_cell() as (cell, launcher):
        launcher.lost(0)
        launcher.wanted()
        cell.client.send(EvictCommand(7, "all"))
        launcher.regroup(1)
        cell.ranks.come_back(0, 1)
        assert cell.client.answer(EvictReport).query_id == 7
        cell.client.submit("a", PROMPT, 3)
        cell.client.wait_for("a")
        assert cell.client.tokens["a"] == oracle(PROMPT, 3)[0]


def test_stop_ends_a_cell_that_is_recovering() -> None:
    with recovering_cell() as (cell, launcher):
        start(cell)
        launcher.lost(1)
        launcher.wanted()
        cell.client.send(Stop("enough"))
        cell.client.wait_for("a", "b")
        assert cell.client.completions["a"].error == "the server is stopping: enough"
        cell.join()
        assert cell.failure is None


def break_steps(cell: ContentCell, launcher: Launcher, num_breaks: int) -> None:
    """Rank 1 dies in each, and comes back but for the last time."""
    cell.ranks.dies_in_step = 1
    for number in range(1, num_breaks + 1):
        eventually(lambda: cell.ranks.num_deaths == number, PATIENCE, "a death")  # noqa: B023
        launcher.tell_lost(1)
        if number == num_breaks:
            cell.ranks.dies_in_step = None
        launcher.wanted()
        launcher.regroup(0)
        cell.ranks.come_back(1, number, f"life {number}")


def test_a_request_that_breaks_every_group_ends_and_the_cell_goes_on() -> None:
    with recovering_cell() as (cell, launcher):
        cell.client.submit("a", PROMPT, LONG)
        break_steps(cell, launcher, 3)
        cell.client.wait_for("a")
        assert cell.client.completions["a"].error == BREAKS_RANKS
        cell.client.submit("b", PROMPT, 3)
        cell.client.wait_for("b")
        assert cell.client.tokens["b"] == oracle(PROMPT, 3)[0]


def test_steps_that_break_every_group_whoever_is_in_them_end_the_cell() -> None:
    with recovering_cell() as (cell, launcher):
        for n in range(4):
            cell.client.submit(f"r{n}", PROMPT, LONG)
        cell.ranks.dies_in_step = 1
        for number in range(1, 5):
            eventually(lambda: cell.ranks.num_deaths == number, PATIENCE, "a death")  # noqa: B023
            launcher.tell_lost(1)
            if number < 4:
                launcher.wanted()
                launcher.regroup(0)
                cell.ranks.come_back(1, number, f"life {number}")
        cell.client.wait_for("r0", "r1", "r2", "r3")
        errors = [cell.client.completions[f"r{n}"].error or "" for n in range(4)]
        assert any("the 4th time in a row without a step in between" in e for e in errors), errors


def test_an_engine_in_place_of_another_gathers_the_ranks_while_requests_wait() -> None:
    with recovering_cell(life=SECOND_LIFE) as (cell, launcher):
        status = cell.client.status()
        assert (status.ready, status.reason) == (False, "recovering: the engine was lost")
        cell.client.submit("a", PROMPT, LONG)
        launcher.regroup(0, 1)
        cell.client.wait_for("a")
        assert cell.client.tokens["a"] == oracle(PROMPT, LONG)[0]
        assert [group.engine_life for group in cell.ranks.groups] == [1, 1]
        assert cell.client.status().steps_total == len(cell.ranks.content.steps)


@pytest.mark.parametrize(("joining", "new_ranks"), [((0, 1), []), ((0,), [1])])
def test_an_engine_in_place_of_another_tells_which_ranks_it_found_and_why_the_other_was_lost(
    joining: tuple[int, ...], new_ranks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    life = EngineLife(1, (0, 0, 0), lost_reason="it hung")
    with recovering_cell(life=life) as (cell, launcher):
        assert cell.client.status().reason == "recovering: the engine was lost: it hung"
        for rank in new_ranks:
            cell.ranks.hang_up(rank)
        launcher.regroup(*joining)
        for rank in new_ranks:
            cell.ranks.come_back(rank, 1)
        status = eventually(lambda: _ready(cell), PATIENCE, "the cell")
        kept = [rank for rank in (0, 1) if rank not in new_ranks]
        assert status.last_recovery == LastRecovery(
            1, "the engine was lost: it hung", status.last_recovery.seconds, new_ranks, kept
        )
    (line,) = [r.getMessage() for r in caplog.records if "recovered" in r.getMessage()]
    assert f"new_ranks={new_ranks} kept_ranks={kept} engine_life=1 " in line
    assert "requests=" not in line


def test_of_a_rank_that_is_named_later_the_status_the_log_and_the_metrics_tell_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recovering_cell(step_timeout_seconds=1.0) as (cell, launcher):
        cell.ranks.may_answer.clear()
        cell.client.submit("a", PROMPT, LONG)
        cell.client.submit("b", PROMPT[::-1], LONG)
        assert cell.client.status().last_recovery is None
        launcher.wanted()
        cell.ranks.may_answer.set()
        launcher.lost(1)
        reason = eventually(lambda: _reason_with(cell, "SIGKILL"), PATIENCE, "the reason")
        assert reason.startswith("recovering: rank 0, 1 ")
        assert reason.endswith("; rank 1 is lost: SIGKILL")
        launcher.regroup(0)
        cell.ranks.come_back(1, 1)
        assert_whole(cell)
        last = cell.client.status().last_recovery
        assert last is not None
        assert (last.generation, last.new_ranks, last.kept_ranks) == (1, [1], [0])
        assert f"recovering: {last.reason}" == reason
        cell.client.send(MetricsQuery(3))
        text = cell.client.answer(MetricsText).text.decode()
    (line,) = [r.getMessage() for r in caplog.records if "recovered" in r.getMessage()]
    told = re.search(r"new_ranks=\[1\] kept_ranks=\[0\] requests=(\d) ", line)
    assert told is not None
    assert f'pointsman_recovered_requests_total{{lost="rank"}} {told[1]}.0' in text
    assert repr(last.reason) in line


def _ready(cell: ContentCell) -> CellStatus | None:
    status = cell.client.status()
    return status if status.ready else None


def _reason_with(cell: ContentCell, text: str) -> str | None:
    reason = cell.client.status().reason
    return reason if text in reason else None


def test_what_ranks_still_send_for_steps_of_an_engine_before_is_none_of_the_next_ones() -> None:
    with recovering_cell(life=SECOND_LIFE) as (cell, launcher):
        launcher.regroup(0, 1)
        with PushSocket(KEYS.worker) as late:
            late.connect(cell.service.route_endpoint)
            for step_id in range(20):
                ids = np.ones((4, SHAPE.num_moe_layers, SHAPE.num_experts_per_tok), np.uint8)
                one, four = np.zeros(1, np.int32), np.full(1, 4, np.int32)
                weights = ids.astype(np.float32)
                late.send(encode(RouteFrame(0, step_id, one, four, ids, weights)))
            cell.client.submit("a", PROMPT, LONG)
            cell.client.wait_for("a")
        assert cell.client.tokens["a"] == oracle(PROMPT, LONG)[0]


def test_ranks_that_do_not_come_to_another_engine_are_named_to_the_launcher_and_then_to_clients() -> (
    None
):
    lost = EngineLife(1, (0, 0, 0), time.monotonic())
    with recovering_cell(recovery_limit_seconds=6.0, life=lost) as (cell, launcher):
        cell.client.submit("a", PROMPT, LONG)
        launcher.regroup(0)  # a new process that never loads is rank 1
        wanted = launcher.wanted()
        assert (wanted.generation, wanted.silent_ranks) == (1, [1])
        cell.client.wait_for("a")
        error = cell.client.refusals["a"].reason
        assert "the engine was lost; not made good within 6 s (--recovery-limit)" in error
        assert "rank 1 did not join group 1" in error


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_while_others_take_other_weights_comes_back_with_these(
    dying: int,
) -> None:
    with recovering_cell() as (cell, launcher):
        cell.ranks.dies_at_commit = dying
        cell.client.send(UpdateWeights(5, "/weights/second", "abort"))
        served = launcher.told(WeightsServed)
        assert (served.model_dir, served.fingerprint) == (
            "/weights/second",
            fingerprint_of("/weights/second"),
        )
        launcher.lost(dying)
        launcher.wanted()
        launcher.regroup(1 - dying)
        cell.ranks.come_back(dying, 1, fingerprint=served.fingerprint)
        assert cell.client.answer(WeightsUpdated).fingerprint == served.fingerprint
        (group,) = cell.ranks.groups
        assert group.model_fingerprint == served.fingerprint
        status = cell.client.status()
        assert (status.ready, status.weight_version) == (True, weight_version(served.fingerprint))


def test_an_engine_that_fails_by_itself_tells_nobody_where_another_will_come() -> None:
    with recovering_cell() as (cell, _):
        cell.store.publish = None  # type: ignore[assignment, method-assign]
        cell.client.submit("a", PROMPT, LONG)
        cell.join()
        assert isinstance(cell.error, TypeError)
        assert cell.client.completions == {}


@pytest.mark.parametrize("kind", ["computed", "replayed"])
def test_what_recovery_cost_is_in_the_metrics(kind: str) -> None:
    with recovering_cell() as (cell, launcher):
        start(cell)
        launcher.lost(1)
        launcher.wanted()
        launcher.regroup(0)
        cell.ranks.come_back(1, 1)
        assert_whole(cell)
        cell.client.send(MetricsQuery(3))
        text = cell.client.answer(MetricsText).text.decode()
        assert "pointsman_recovery_seconds_count 1.0" in text
        assert f'pointsman_recovered_tokens_total{{source="{kind}"}} 0.0' not in text
