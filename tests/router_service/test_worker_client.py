"""The engine's side of the worker sockets over real ZeroMQ; the workers are sockets that the test plays itself."""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from cluster.channel import DealerSocket, PullSocket, PushSocket, RouterSocket
from cluster.errors import (
    CellError,
    DeadlineError,
    GroupBrokenError,
    RankLostError,
    WireError,
)
from cluster.rank_name import RankName
from cluster.rank_place import RankPlace
from cluster.scores import ScoreColumns
from cluster.types import Rank, StepId
from cluster.wire import Decoder, encode
from cluster.worker_messages import (
    CellIdentity,
    GroupBroken,
    HeldPlan,
    PlansHeld,
    RouteFrame,
    SentTraffic,
    StepDescriptor,
    StepResult,
    StepTimings,
    ToWorker,
    WorkerFailed,
    WorkerReady,
    WorkerStop,
)
from router_service.step_builder import build_step
from router_service.step_clock import StepClock
from router_service.worker_client import WorkerClient

HOST = "127.0.0.1"
PLACE = RankPlace(HOST, "cpu")
PATIENCE = 10.0
SHORT = 0.2
IDENTITY = CellIdentity(
    model_fingerprint="minnow",
    dtype="float32",
    deterministic=False,
    ep_size=2,
    placement_epoch=0,
    dispatch="negotiated",
    block_size=16,
    num_kv_blocks=8,
)


class Ends:
    """Both ends of a cell of two ranks in one thread: the client, the workers' sockets, one of the launcher."""

    def __init__(self) -> None:
        self.clients = RouterSocket()
        self.launcher = DealerSocket("launcher")
        self.launcher.connect(self.clients.bind(HOST))
        self.workers, routes = RouterSocket(), PullSocket()
        endpoint, route_endpoint = self.workers.bind(HOST), routes.bind(HOST)
        self.ranks = [DealerSocket(str(RankName(rank))) for rank in range(2)]
        self.routes = PushSocket()
        self.routes.connect(route_endpoint)
        for rank in self.ranks:
            rank.connect(endpoint)
        self.on_client_message: Callable[[], None] = lambda: None
        self.clock = StepClock(factor=1.0, floor_seconds=PATIENCE)
        self.client = WorkerClient(
            identity=IDENTITY,
            workers=self.workers,
            routes=routes,
            clients=self.clients,
            on_client_message=self._take_client_message,
            clock=self.clock,
        )
        self.sockets = [self.clients, self.launcher, self.workers, routes, self.routes, *self.ranks]

    def _take_client_message(self) -> None:
        assert self.clients.receive(0.0) is not None
        self.on_client_message()

    def all_ready(self) -> None:
        for rank, socket in enumerate(self.ranks):
            socket.send(encode(WorkerReady(rank, 1000 + rank, IDENTITY, "first life", PLACE)))
        self.client.wait_until_ready(PATIENCE)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for socket in ends.sockets:
        socket.close()


def make_step(step_id: int = 0) -> StepDescriptor:
    return build_step(StepId(step_id), [], [], placement_epoch=0, dispatch="negotiated")


def make_result(rank: int, step_id: int = 0) -> StepResult:
    timings = StepTimings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    load = np.zeros((1, 1), np.int32)
    scores = ScoreColumns(
        np.zeros(1, np.float32), *[np.ones(1, np.int32)] * 2, *[np.zeros(1, np.int32)] * 2
    )
    return StepResult(rank, step_id, [rank], [5], [], 0, load, SentTraffic(0, 0), scores, timings)


def make_frame(rank: int) -> RouteFrame:
    one = np.array([1], np.int32)
    return RouteFrame(rank, 0, one, one, np.zeros((1, 2, 2), np.uint8), np.zeros((1, 2, 2), "<f4"))


def raise_lost(rank: int) -> Callable[[], None]:
    def on_client_message() -> None:
        raise RankLostError(rank, "named by the launcher")

    return on_client_message


def test_workers_are_ready_when_every_rank_has_said_so(ends: Ends) -> None:
    ends.ranks[1].send(encode(WorkerReady(1, 11, IDENTITY, "first life", PLACE)))
    ends.ranks[0].send(encode(WorkerReady(0, 10, IDENTITY, "first life", PLACE)))
    assert [ready.pid for ready in ends.client.wait_until_ready(PATIENCE)] == [10, 11]


def test_a_rank_that_does_not_start_is_named_with_the_setting(ends: Ends) -> None:
    ends.ranks[0].send(encode(WorkerReady(0, 10, IDENTITY, "first life", PLACE)))
    with pytest.raises(DeadlineError, match=r"rank 1 did not start .*start_timeout_seconds"):
        ends.client.wait_until_ready(SHORT)


def test_a_rank_that_fails_to_start_ends_the_wait_with_its_reason(ends: Ends) -> None:
    ends.ranks[1].send(encode(WorkerFailed(1, -1, "no such file")))
    with pytest.raises(RankLostError, match="rank 1 is lost: no such file"):
        ends.client.wait_until_ready(PATIENCE)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model_fingerprint", "another", "minnow"),
        ("dtype", "bfloat16", "float32"),
        ("deterministic", True, False),
        ("ep_size", 4, 2),
        ("placement_epoch", 1, 0),
        ("dispatch", "local", "negotiated"),
        ("block_size", 32, 16),
        ("num_kv_blocks", 7, 8),
    ],
)
def test_a_rank_that_differs_from_the_cell_is_refused_with_the_field_and_both_values(
    ends: Ends, field: str, value: object, expected: object
) -> None:
    other = msgspec.structs.replace(IDENTITY, **{field: value})
    ends.ranks[0].send(encode(WorkerReady(0, 10, IDENTITY, "first life", PLACE)))
    ends.ranks[1].send(encode(WorkerReady(1, 11, other, "first life", PLACE)))
    message = f"^rank 1 has {field} {value!r}, the engine expects {expected!r}$"
    with pytest.raises(CellError, match=message):
        ends.client.wait_until_ready(PATIENCE)


def test_all_differences_of_all_ranks_are_one_error(ends: Ends) -> None:
    for rank, socket in enumerate(ends.ranks):
        other = msgspec.structs.replace(IDENTITY, dtype="bfloat16", block_size=32 * (rank + 1))
        socket.send(encode(WorkerReady(rank, 10, other, "first life", PLACE)))
    with pytest.raises(CellError) as refused:
        ends.client.wait_until_ready(PATIENCE)
    assert str(refused.value) == (
        "rank 0 has dtype 'bfloat16', the engine expects 'float32'; "
        "rank 0 has block_size 32, the engine expects 16; "
        "rank 1 has dtype 'bfloat16', the engine expects 'float32'; "
        "rank 1 has block_size 64, the engine expects 16"
    )


def test_a_step_goes_to_every_rank_and_results_come_back_by_rank(ends: Ends) -> None:
    ends.all_ready()
    for rank in (1, 0):
        ends.ranks[rank].send(encode(make_result(rank)))
    assert [result.rank for result in ends.client.execute(make_step())] == [0, 1]
    decoder: Decoder[ToWorker] = Decoder(ToWorker)
    frames = [socket.receive(PATIENCE) for socket in ends.ranks]
    assert frames[0] == frames[1] is not None
    assert isinstance(decoder.decode(frames[0]), StepDescriptor)


def test_answers_to_an_earlier_step_do_not_count(ends: Ends) -> None:
    ends.all_ready()
    for step_id in (6, 7):
        for rank in (0, 1):
            ends.ranks[rank].send(encode(make_result(rank, step_id)))
    results = ends.client.execute(make_step(7))
    assert [result.step_id for result in results] == [7, 7]


def test_the_deadline_of_a_step_names_only_the_rank_that_did_not_answer(ends: Ends) -> None:
    ends.all_ready()
    ends.clock.floor_seconds = SHORT
    ends.ranks[0].send(encode(make_result(0)))
    with pytest.raises(DeadlineError, match=r"^rank 1 did not answer step 0 within"):
        ends.client.execute(make_step())


def test_answers_that_are_there_count_although_the_engine_was_late_to_read_them(ends: Ends) -> None:
    ends.all_ready()
    ends.clock.floor_seconds = SHORT

    def answer_and_pause() -> None:
        for rank in (0, 1):
            ends.ranks[rank].send(encode(make_result(rank)))
        threading.Event().wait(2 * SHORT)

    ends.on_client_message = answer_and_pause
    ends.launcher.send(b"query")
    assert len(ends.client.execute(make_step())) == 2


def test_clients_are_served_while_a_step_runs(ends: Ends) -> None:
    ends.all_ready()

    def answer() -> None:
        for rank in (0, 1):
            ends.ranks[rank].send(encode(make_result(rank)))

    ends.on_client_message = answer
    ends.launcher.send(b"query")
    assert len(ends.client.execute(make_step())) == 2


def test_a_death_that_the_launcher_reports_ends_the_step_at_once(ends: Ends) -> None:
    ends.all_ready()
    ends.on_client_message = raise_lost(1)
    ends.launcher.send(b"rank 1 died")
    with pytest.raises(RankLostError, match="rank 1 is lost: named by the launcher"):
        ends.client.execute(make_step())


def test_a_broken_exchange_is_told_by_who_saw_it(ends: Ends) -> None:
    ends.all_ready()
    ends.ranks[0].send(encode(GroupBroken(0, 0, "connection closed by peer")))
    with pytest.raises(GroupBrokenError, match=r"^rank 0: connection closed"):
        ends.client.execute(make_step())


def test_a_failure_that_is_the_ranks_own_is_blamed_on_it_at_once(ends: Ends) -> None:
    ends.all_ready()
    ends.on_client_message = raise_lost(0)
    ends.ranks[1].send(encode(WorkerFailed(1, 0, "out of memory")))
    with pytest.raises(RankLostError, match="rank 1 is lost: out of memory"):
        ends.client.execute(make_step())


def test_a_failure_between_steps_is_raised_when_it_is_looked_for(ends: Ends) -> None:
    ends.all_ready()
    ends.client.take_failure()
    ends.ranks[1].send(encode(WorkerFailed(1, 3, "killed")))
    assert ends.workers.socket.poll(10_000)
    with pytest.raises(RankLostError, match="rank 1 is lost: killed"):
        ends.client.take_failure()


def test_a_rank_that_is_not_connected_is_lost_by_name_where_its_answer_is_waited_for(
    ends: Ends,
) -> None:
    ends.client.end_sequences(Rank(2), [1])
    with pytest.raises(RankLostError, match="rank 2 is lost: cannot send to rank-2"):
        ends.client.execute(make_step())


def test_a_group_is_taken_with_its_new_processes_and_only_these_are_compared(ends: Ends) -> None:
    ends.all_ready()
    ends.client.end_sequences(Rank(7), [1])
    other = msgspec.structs.replace(IDENTITY, model_fingerprint="other weights")
    ready = [
        WorkerReady(0, 10, IDENTITY, "first life", PLACE, 1),
        WorkerReady(1, 11, other, "second life", PLACE, 1),
    ]
    with pytest.raises(CellError, match="rank 1 has model_fingerprint 'other weights'"):
        ends.client.take_group(ready, IDENTITY)
    assert ends.client.take_group(ready, other) == [1]
    assert ends.client.take_group(ready, IDENTITY) == []


def test_what_is_no_message_is_an_error_and_not_skipped(ends: Ends) -> None:
    ends.all_ready()
    ends.ranks[0].send(b"\x01nonsense")
    with pytest.raises(WireError):
        ends.client.execute(make_step())


def test_only_what_the_present_process_of_a_rank_acknowledged_counts(ends: Ends) -> None:
    ends.all_ready()
    for life, fragment_id in (("an earlier life", 3), ("first life", 4)):
        ends.ranks[1].send(encode(_plans_held(1, life, fragment_id)))
    assert ends.workers.socket.poll(10_000)
    assert _held(ends) == [_plans_held(1, "first life", 4)]
    assert ends.client.plans_held(0.0) == []


def test_what_is_acknowledged_during_a_step_is_kept_for_after_it(ends: Ends) -> None:
    ends.all_ready()
    held = _plans_held(0, "first life", 7)
    ends.ranks[0].send(encode(held))
    for rank in (0, 1):
        ends.ranks[rank].send(encode(make_result(rank)))
    ends.client.execute(make_step())
    assert ends.client.plans_held(0.0) == [held]


def _plans_held(rank: int, life: str, fragment_id: int) -> PlansHeld:
    return PlansHeld(rank, life, [HeldPlan(fragment_id, b"digest")])


def _held(ends: Ends) -> list[PlansHeld]:
    """The first acknowledgements that count; messages of one sender keep their order."""
    held: list[PlansHeld] = []
    for _ in range(10):
        held += ends.client.plans_held(0.0 if held else 1.0)
    return held


def test_route_frames_that_have_arrived_come_all_at_once(ends: Ends) -> None:
    assert ends.client.frames(0.0) == []
    assert ends.client.frames(SHORT) == []
    ends.routes.send(encode(make_frame(0)))
    first = ends.client.frames(PATIENCE)
    assert [frame.rank for frame in first] == [0]


def test_a_death_ends_the_wait_for_routes(ends: Ends) -> None:
    ends.all_ready()
    ends.on_client_message = raise_lost(1)
    ends.launcher.send(b"rank 1 died")
    with pytest.raises(RankLostError, match="rank 1"):
        ends.client.frames(PATIENCE)


def test_a_worker_that_fails_ends_the_wait_for_routes(ends: Ends) -> None:
    ends.all_ready()
    ends.ranks[0].send(encode(WorkerFailed(0, 3, "killed")))
    with pytest.raises(RankLostError, match="rank 0"):
        ends.client.frames(PATIENCE)


def test_stop_reaches_the_living_although_another_is_gone(ends: Ends) -> None:
    ends.all_ready()
    ends.ranks[0].close()
    ends.client.stop()
    frame = ends.ranks[1].receive(PATIENCE)
    assert frame is not None
    assert Decoder(ToWorker).decode(frame) == WorkerStop()


def test_a_replaced_process_is_not_heard_any_more_and_is_told_to_end(ends: Ends) -> None:
    ends.all_ready()
    endpoint = ends.workers.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with DealerSocket(str(RankName(1, came_with=3))) as later:
        later.connect(endpoint)
        later.send(encode(WorkerReady(1, 1101, IDENTITY, "second life", PLACE, generation=3)))
        message = ends.client.receive(time.monotonic() + PATIENCE)
        assert isinstance(message, WorkerReady)
        ends.ranks[1].send(encode(GroupBroken(1, 0, "rank 0 is gone")))
        assert ends.client.receive(time.monotonic() + SHORT) is None
        assert answer_to(ends.ranks[1]) == WorkerStop()
        ends.client.stop()
        assert answer_to(later) == WorkerStop()


def answer_to(socket: DealerSocket) -> ToWorker:
    frame = socket.receive(PATIENCE)
    assert frame is not None
    return Decoder(ToWorker).decode(frame)
