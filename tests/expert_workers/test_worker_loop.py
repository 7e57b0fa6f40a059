"""Workers behind their sockets, driven by an engine of the test's own in a process beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore

from cluster.channel import PullSocket, RouterSocket
from cluster.errors import CellError, WireError
from cluster.namespace import model_fingerprint
from cluster.rank_name import RankName
from cluster.rank_place import RankPlace
from cluster.routes import ExpertRoutes
from cluster.types import DispatchMode
from cluster.wire import Decoder, encode
from cluster.worker_messages import (
    CellIdentity,
    GroupBroken,
    HeldPlan,
    JoinGroup,
    PlansHeld,
    RouteFrame,
    SequenceEnd,
    SequenceStart,
    StepDescriptor,
    StepResult,
    ToEngineFromWorker,
    ToWorker,
    WorkerFailed,
    WorkerReady,
    WorkerStop,
)
from expert_workers.ep_group import host_store, leave_group
from expert_workers.worker_builder import WorkerOptions, build_expert_worker
from expert_workers.worker_loop import run_worker
from tests.expert_workers.dispatch.plan_cases import even_case, plan_part
from tests.expert_workers.driving import (
    BLOCK_SIZE,
    DEMO_MODEL,
    NUM_KV_BLOCKS,
    SPEC,
    ChunkSpec,
    DrivenSequence,
    Driver,
    OneWorkerCell,
    make_options,
    make_prompt,
    make_step,
)
from tests.helpers.ranks import LOOPBACK, RankContext, run_ranks

EP_SIZE = 2
StoreNamed = Callable[[str], FileStore]
PLACE = RankPlace(LOOPBACK, "cpu")
WAIT_SECONDS = 20.0
IDENTITY = CellIdentity(
    model_fingerprint=model_fingerprint(DEMO_MODEL, "float32"),
    dtype="float32",
    deterministic=True,
    ep_size=EP_SIZE,
    placement_epoch=0,
    dispatch="negotiated",
    block_size=BLOCK_SIZE,
    num_kv_blocks=NUM_KV_BLOCKS,
)


class SocketCell:
    """The engine's end: tells workers by name, waits for a result of each and for the routes of those with a gate."""

    dispatch: DispatchMode = "negotiated"

    def __init__(self, workers: RouterSocket, routes: PullSocket, store: StoreNamed) -> None:
        self._workers = workers
        self._routes = routes
        self.store = store
        self._names: dict[int, bytes] = {}
        """By rank, of the process that has spoken last."""
        self._decoder: Decoder[ToEngineFromWorker] = Decoder(ToEngineFromWorker)
        self._route_decoder: Decoder[RouteFrame] = Decoder(RouteFrame)

    def receive(self) -> ToEngineFromWorker:
        received = self._workers.receive(WAIT_SECONDS)
        assert received is not None, "no worker answered"
        peer, frame = received
        if (name := RankName.read(peer)) is not None:
            self._names[name.rank] = peer
        return self._decoder.decode(frame)

    def ready_workers(self) -> list[WorkerReady]:
        messages = [self.receive() for _ in range(EP_SIZE)]
        return sorted((m for m in messages if isinstance(m, WorkerReady)), key=lambda m: m.rank)

    def tell(
        self,
        rank: int,
        message: ToWorker,
    ) -> None:
        self.send_frame(rank, encode(message))

    def send_frame(self, rank: int, frame: bytes) -> None:
        self._workers.send(self._names[rank], frame)

    def tell_all(self, message: ToWorker) -> None:
        for rank in range(EP_SIZE):
            self.tell(rank, message)

    def execute(self, step: StepDescriptor) -> tuple[list[StepResult], list[RouteFrame]]:
        self.tell_all(step)
        messages = [self.receive() for _ in range(EP_SIZE)]
        results = [m for m in messages if isinstance(m, StepResult)]
        assert len(results) == EP_SIZE, f"not all answered: {messages}"
        frames = [self._frame() for result in results if result.gate_tokens]
        return sorted(results, key=lambda r: r.rank), frames

    def _frame(self) -> RouteFrame:
        frame = self._routes.receive(WAIT_SECONDS)
        assert frame is not None, "no route frame arrived"
        return self._route_decoder.decode(frame)


def run_cell(engine: Callable[[SocketCell], Any], serve: Callable[[RankContext], Any]) -> list[Any]:
    """Answers of the workers, then of the engine. The engine's endpoints travel through the ranks' store."""

    def run_one(context: RankContext) -> Any:
        if context.rank < EP_SIZE:
            return serve(context)
        with RouterSocket() as workers, PullSocket() as routes:
            endpoints = f"{workers.bind(LOOPBACK)} {routes.bind(LOOPBACK)}"
            context.store("endpoints").set("endpoints", endpoints)
            return engine(SocketCell(workers, routes, context.store))

    return run_ranks(EP_SIZE + 1, run_one)


def serve_until_stopped(
    context: RankContext,
    options: WorkerOptions | None = None,
    generation: int = 0,
    engine_life: int = 0,
) -> str:
    """How the loop ended: "stopped" or the error. options: of a group that meets elsewhere than the first one."""
    store = context.store("endpoints")
    engine, routes = store.get("endpoints").decode().split()
    if options is None:
        options, meeting = make_options(context.rank, EP_SIZE), context.store("group")
        worker = build_expert_worker(options, store=meeting)
    else:
        worker = build_expert_worker(options)
    try:
        run_worker(
            worker,
            rank=context.rank,
            place=PLACE,
            engine_endpoint=engine,
            route_endpoint=routes,
            generation=generation,
            engine_life=engine_life,
        )
    except CellError as error:
        return type(error).__name__
    return "stopped"


def make_sequences(ep_size: int) -> list[DrivenSequence]:
    return [DrivenSequence(i, make_prompt(20 + 11 * i, seed=i), rank=i % ep_size) for i in range(3)]


@dataclass(frozen=True)
class Story:
    """Outputs of a cold run and of its replay, the replay's tokens that went through a gate, the cold run's routes."""

    cold: list[list[int]]
    replayed: list[list[int]]
    replay_gate_tokens: int
    route_ids: list[list[int]]


def prefill_decode_replay(driver: Driver, ep_size: int) -> Story:
    cold = make_sequences(ep_size)
    driver.run(cold, 6)
    warm = make_sequences(ep_size)
    for sequence, before in zip(warm, cold, strict=True):
        routes: ExpertRoutes = before.all_routes
        sequence.replay = routes.slice(0, len(sequence.prompt))
    results = driver.run(warm, 6)
    return Story(
        [s.output for s in cold],
        [s.output for s in warm],
        sum(result.gate_tokens for result in results),
        [s.all_routes.topk_ids.ravel().tolist() for s in cold],
    )


def tell_by_sockets(cell: SocketCell) -> Story:
    ready = cell.ready_workers()
    assert [r.rank for r in ready] == [0, 1]
    assert [r.identity for r in ready] == [IDENTITY, IDENTITY]
    story = prefill_decode_replay(Driver(cell, chunk_tokens=16), EP_SIZE)
    cell.tell(0, SequenceEnd([0, 2]))
    cell.tell_all(WorkerStop())
    return story


def test_two_workers_behind_sockets_generate_what_one_worker_does() -> None:
    (alone,) = run_ranks(
        1,
        lambda context: prefill_decode_replay(
            Driver(OneWorkerCell(build_expert_worker(make_options()))), ep_size=1
        ),
    )
    first, second, together = run_cell(tell_by_sockets, serve_until_stopped)
    assert (first, second) == ("stopped", "stopped")
    assert together == alone
    assert together.replayed == together.cold
    assert together.replay_gate_tokens == 3 * 5  # the five tokens that each decodes after its first


def test_a_plan_part_is_acknowledged_by_the_process_that_holds_it() -> None:
    case = even_case(0, [[3], []], num_experts=SPEC.gate.num_experts, k=4, num_layers=4)

    def send_plan_parts(cell: SocketCell) -> list[ToEngineFromWorker]:
        ready = cell.ready_workers()
        ((of_rank_0,), _) = case.fragments()
        for rank in range(EP_SIZE):
            cell.tell(rank, plan_part(of_rank_0, 31, rank))
        held = sorted((cell.receive() for _ in range(EP_SIZE)), key=lambda message: message.rank)
        cell.tell_all(WorkerStop())
        return [*ready, *held]

    *ended, messages = run_cell(send_plan_parts, serve_until_stopped)
    assert ended == ["stopped", "stopped"]
    lives = [m.incarnation for m in messages if isinstance(m, WorkerReady)]
    assert len(set(lives)) == EP_SIZE
    held = [HeldPlan(31, case.fragments()[0][0].digest)]
    assert messages[EP_SIZE:] == [PlansHeld(rank, lives[rank], held) for rank in range(EP_SIZE)]


def refused_step() -> StepDescriptor:
    """Rank 0 has not the routes that it shall replay."""
    chunks = [
        ChunkSpec(6, [5, 6], [0], route_id=3, samples=False),
        ChunkSpec(7, [5, 6], [0], rank=1),
    ]
    return make_step(11, chunks, dispatch="negotiated")


def test_a_refused_step_ends_its_rank_and_the_other_leaves_the_group_and_waits() -> None:
    def send_a_step_that_rank_0_cannot_run(
        cell: SocketCell,
    ) -> dict[int, WorkerFailed | GroupBroken]:
        cell.ready_workers()
        cell.tell(1, SequenceStart(7, 0.0, 1.0, 0))
        cell.tell_all(refused_step())
        failures = [cell.receive() for _ in range(EP_SIZE)]
        cell.tell(1, WorkerStop())
        return {m.rank: m for m in failures if isinstance(m, WorkerFailed | GroupBroken)}

    first, second, failures = run_cell(send_a_step_that_rank_0_cannot_run, serve_until_stopped)
    assert (first, second) == ("StepRefusedError", "stopped")
    assert failures[0] == WorkerFailed(
        0,
        11,
        "StepRefusedError: step 11: seq 6 replays route 3, which rank 0 has not received for this step",
    )
    assert isinstance(failures[1], GroupBroken)
    assert failures[1].generation == 0
    assert "\n" not in failures[1].reason


def test_a_rank_that_is_replaced_and_one_that_lived_are_a_group_again() -> None:
    """What the one that lived knows, KV and sequences, is still there; what it counted of the broken step is not."""

    def break_and_go_on(cell: SocketCell) -> tuple[Story, list[int], list[str]]:
        before = cell.ready_workers()
        kept = DrivenSequence(3, make_prompt(9, seed=40), rank=1)
        driver = Driver(cell, chunk_tokens=16)
        driver.run([kept], 2)
        cell.tell(1, SequenceStart(7, 0.0, 1.0, 0))
        cell.tell_all(refused_step())
        failed = {type(cell.receive()) for _ in range(EP_SIZE)}
        assert failed == {WorkerFailed, GroupBroken}
        rendezvous = host_store(LOOPBACK, 0, WAIT_SECONDS)
        cell.store("second group").set("port", str(rendezvous.port))
        cell.tell(1, JoinGroup(1, LOOPBACK, rendezvous.port, WAIT_SECONDS))
        after = cell.ready_workers()
        assert [ready.generation for ready in after] == [1, 1]
        story = prefill_decode_replay(driver, EP_SIZE)
        driver.run([kept], 3)
        cell.tell_all(WorkerStop())
        return story, kept.output, [r.incarnation for r in (*before, *after)]

    def serve(context: RankContext) -> str:
        ended = serve_until_stopped(context)
        if context.rank == 1:
            return ended
        port = int(context.store("second group").get("port"))
        options = replace(make_options(0, EP_SIZE), store_address=LOOPBACK, store_port=port)
        leave_group()
        return f"{ended}, {serve_until_stopped(context, options, generation=1)}"

    alone, kept_alone = run_ranks(1, generate_alone)[0]
    first, second, (story, kept, lives) = run_cell(break_and_go_on, serve)
    assert (first, second) == ("StepRefusedError, stopped", "stopped")
    assert story == alone
    assert kept == kept_alone
    assert lives[0] != lives[2]
    assert lives[1] == lives[3]


def generate_alone(context: RankContext) -> tuple[Story, list[int]]:
    driver = Driver(OneWorkerCell(build_expert_worker(make_options())))
    kept = DrivenSequence(3, make_prompt(9, seed=40))
    driver.run([kept], 2)
    story = prefill_decode_replay(driver, 1)
    driver.run([kept], 3)
    return story, kept.output


def test_a_group_that_does_not_come_together_is_told_and_the_rank_waits_for_the_next() -> None:
    def send_them_nowhere(cell: SocketCell) -> list[ToEngineFromWorker]:
        cell.ready_workers()
        cell.tell_all(JoinGroup(1, LOOPBACK, 1, 0.5))
        broken = [cell.receive() for _ in range(EP_SIZE)]
        rendezvous = host_store(LOOPBACK, 0, WAIT_SECONDS)
        cell.tell_all(JoinGroup(2, LOOPBACK, rendezvous.port, WAIT_SECONDS))
        ready = cell.ready_workers()
        assert prefill_decode_replay(Driver(cell, chunk_tokens=16), EP_SIZE).cold
        cell.tell_all(WorkerStop())
        return [*sorted(broken, key=lambda message: message.rank), *ready]

    first, second, messages = run_cell(send_them_nowhere, serve_until_stopped)
    assert (first, second) == ("stopped", "stopped")
    assert [type(m) for m in messages] == [GroupBroken] * 2 + [WorkerReady] * 2
    assert [m.generation for m in messages] == [1, 1, 2, 2]
    assert "could not join the EP group" in messages[0].reason


def test_a_rank_forgets_what_an_engine_of_another_life_had_told_it() -> None:
    """Else a sequence of the next engine that has the same id would go on with what this one was told."""

    def change_engines(cell: SocketCell) -> list[ToEngineFromWorker]:
        cell.ready_workers()
        cell.tell(0, SequenceStart(7, 0.0, 1.0, 0))
        rendezvous = host_store(LOOPBACK, 0, WAIT_SECONDS)
        cell.tell_all(JoinGroup(1, LOOPBACK, rendezvous.port, WAIT_SECONDS, engine_life=1))
        cell.ready_workers()
        assert prefill_decode_replay(Driver(cell, chunk_tokens=16), EP_SIZE).cold
        cell.tell_all(make_step(50, [ChunkSpec(7, [5, 6], [0])], dispatch="negotiated"))
        failures = [cell.receive() for _ in range(EP_SIZE)]
        cell.tell(1, WorkerStop())
        return failures

    first, second, failures = run_cell(change_engines, serve_until_stopped)
    assert (first, second) == ("StepRefusedError", "stopped")
    (failed,) = [failure for failure in failures if isinstance(failure, WorkerFailed)]
    assert "samples or scores seq 7, which rank 0 was never told of" in failed.reason


def test_a_rank_that_came_after_an_engine_had_been_lost_keeps_what_the_present_one_told_it() -> (
    None
):
    def meet_again(cell: SocketCell) -> list[ToEngineFromWorker]:
        cell.ready_workers()
        cell.tell(0, SequenceStart(7, 0.0, 1.0, 0))
        rendezvous = host_store(LOOPBACK, 0, WAIT_SECONDS)
        cell.tell_all(JoinGroup(1, LOOPBACK, rendezvous.port, WAIT_SECONDS, engine_life=1))
        cell.ready_workers()
        cell.tell_all(make_step(50, [ChunkSpec(7, [5, 6], [0])], dispatch="negotiated"))
        answers = [cell.receive() for _ in range(EP_SIZE)]
        cell.tell_all(WorkerStop())
        return answers

    first, second, answers = run_cell(meet_again, partial(serve_until_stopped, engine_life=1))
    assert (first, second) == ("stopped", "stopped")
    assert {type(answer) for answer in answers} == {StepResult}


def test_a_rank_with_other_weights_than_the_cell_ends_with_a_word() -> None:
    def expect_others(cell: SocketCell) -> ToEngineFromWorker:
        cell.ready_workers()
        cell.tell(0, JoinGroup(1, LOOPBACK, 1, 0.5, model_fingerprint="others"))
        message = cell.receive()
        cell.tell(1, WorkerStop())
        return message

    first, second, failed = run_cell(expect_others, serve_until_stopped)
    assert (first, second) == ("CellError", "stopped")
    assert isinstance(failed, WorkerFailed)
    assert failed.rank == 0
    assert failed.reason.endswith(", the cell others")


def test_a_frame_that_is_no_message_ends_the_worker_with_a_word() -> None:
    def send_noise(cell: SocketCell) -> WorkerFailed:
        cell.ready_workers()
        cell.send_frame(1, b"\x63noise")
        cell.tell(0, WorkerStop())
        message = cell.receive()
        assert isinstance(message, WorkerFailed)
        return message

    def serve(context: RankContext) -> str:
        if context.rank == 0:
            return serve_until_stopped(context)
        with pytest.raises(WireError, match="protocol version 99"):
            serve_until_stopped(context)
        return "refused"

    first, second, failure = run_cell(send_noise, serve)
    assert (first, second) == ("stopped", "refused")
    assert (failure.rank, failure.step_id) == (1, -1)
    assert failure.reason.startswith("WireError: protocol version 99")
