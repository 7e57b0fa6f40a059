"""An engine service over real sockets whose workers hold digests: one thread serves, one plays all ranks."""

import threading
from collections import deque
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from cluster.channel import DealerSocket, PushSocket
from cluster.config import CellSection, Config, SchedulerSection
from cluster.messages import (
    CellStatus,
    Completion,
    OutputBatch,
    Refused,
    SamplingParams,
    StatusQuery,
    Stop,
    Submit,
    SubmitAll,
    ToEngine,
    ToHttpServer,
)
from cluster.placement import ExpertPlacement
from cluster.rank_name import RankName
from cluster.rank_place import RankPlace
from cluster.scores import SCORE_BYTES
from cluster.types import Rank
from cluster.wire import Decoder, encode
from cluster.worker_messages import (
    CellIdentity,
    CommitWeights,
    DiscardWeights,
    JoinGroup,
    LoadFailure,
    MeasureWeights,
    PrepareWeights,
    RouteChunk,
    SequenceEnd,
    SequenceStart,
    StepDescriptor,
    ToExchangeWeights,
    ToWorker,
    WeightsCommitted,
    WeightsMeasured,
    WeightsPrepared,
    WorkerReady,
    WorkerStop,
)
from prefix_store.compiler_thread import CompilerThread
from prefix_store.journal.store_journal import StoreJournal
from prefix_store.store import PrefixStore
from router_service.engine_composition import ServedShapes
from router_service.engine_life import EngineLife
from router_service.engine_service import EngineService
from router_service.engine_sockets import EngineAddress
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_workers import SHAPE, VOCAB, ContentWorkers
from tests.helpers.engines import make_namespace
from tests.helpers.other_weights import NamedCheckpoints, fingerprint_of

HOST = "127.0.0.1"
PATIENCE = 20.0
BLOCK_SIZE = 4
NUM_KV_BLOCKS = 64
FINGERPRINT = "digests"
_POLL = 0.02
A = TypeVar("A")


def make_identity(num_ranks: int) -> CellIdentity:
    return CellIdentity(
        model_fingerprint=FINGERPRINT,
        dtype="float32",
        deterministic=True,
        ep_size=num_ranks,
        placement_epoch=0,
        dispatch="negotiated",
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_KV_BLOCKS,
    )


class ContentRanks:
    """Plays all ranks of a cell in one thread. Owner of their sockets while the thread runs.

    `may_answer` is cleared by a test to hold a step's answer back; `hang_up` closes every socket of a rank, as its
    death would.
    """

    def __init__(self, service: EngineService, num_ranks: int) -> None:
        self.content = ContentWorkers(num_ranks, BLOCK_SIZE)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.in_step = threading.Event()
        self.hold_from: int | None = None
        """Steps from this one on are not answered until `release`."""
        self.is_held = False
        self.load_failures: dict[int, LoadFailure] = {}
        """By rank; others can read what they are told to."""
        self.rooms: dict[int, tuple[str, int, int]] = {}
        """By rank: host, bytes that other weights take, bytes that are free. Others need nothing."""
        self.unmeasurable: set[int] = set()
        """Ranks that fail when they look at other weights."""
        self.num_prepared = 0
        self.other_files: set[int] = set()
        """Ranks that see other files than the engine."""
        self.silent_loaders: set[int] = set()
        """Ranks that never say that they have read."""
        self.num_discards = 0
        self._service = service
        self._num_ranks = num_ranks
        self._stop = threading.Event()
        self._hang_ups: deque[int] = deque()
        self._come: tuple[int, int, str, str] | None = None
        self.dies_in_step: int | None = None
        """This rank does, in every step."""
        self.num_deaths = 0
        self.dies_at_commit: int | None = None
        """This rank does, when it is told to serve other weights."""
        self.groups: list[JoinGroup] = []
        """That some rank was told to join."""
        self._prepared: str | None = None
        self._have_step: set[int] = set()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def release(self) -> None:
        """From `hold_from`."""
        self.hold_from = None
        self.is_held = False
        self.may_answer.set()

    def hang_up(self, rank: int) -> None:
        self._hang_ups.append(rank)

    def come_back(
        self,
        rank: int,
        generation: int,
        incarnation: str = "second life",
        fingerprint: str = FINGERPRINT,
    ) -> None:
        """As another process, which has joined this group with these weights."""
        self._come = rank, generation, incarnation, fingerprint

    @property
    def have_come(self) -> bool:
        """All that were to come back."""
        return self._come is None

    def stop(self) -> None:
        self.may_answer.set()
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        sockets = {
            rank: DealerSocket(str(RankName(rank)), KEYS.worker) for rank in range(self._num_ranks)
        }
        routes = PushSocket(KEYS.worker)
        routes.connect(self._service.route_endpoint)
        for rank, socket in sockets.items():
            socket.connect(self._service.worker_endpoint)
            socket.send(self._ready(rank, "first life"))
        while not self._stop.is_set():
            for rank, socket in list(sockets.items()):
                if not self._serve(rank, socket, sockets, routes):
                    sockets.pop(rank).close()
            self._lose(sockets)
            self._replace(sockets)
        for socket in sockets.values():
            socket.close()
        routes.close_after_sending(1.0)

    def _lose(self, sockets: dict[int, DealerSocket]) -> None:
        while self._hang_ups:
            rank = self._hang_ups.popleft()
            if rank in sockets:
                self._have_step.clear()
                self.content.lose_rank(rank, 0)
                sockets.pop(rank).close()

    def _replace(self, sockets: dict[int, DealerSocket]) -> None:
        if self._come is None or self._hang_ups:
            return
        rank, generation, incarnation, fingerprint = self._come
        self._come = None
        assert rank not in sockets
        sockets[rank] = DealerSocket(str(RankName(rank, generation)), KEYS.worker)
        sockets[rank].connect(self._service.worker_endpoint)
        sockets[rank].send(self._ready(rank, incarnation, generation, fingerprint))

    def _ready(
        self, rank: int, incarnation: str, generation: int = 0, fingerprint: str = FINGERPRINT
    ) -> bytes:
        place = RankPlace("127.0.0.1", "cpu")
        identity = replace(make_identity(self._num_ranks), model_fingerprint=fingerprint)
        return encode(WorkerReady(rank, 0, identity, incarnation, place, generation))

    def _serve(
        self, rank: int, socket: DealerSocket, sockets: dict[int, DealerSocket], routes: PushSocket
    ) -> bool:
        frame = socket.receive(_POLL)
        if frame is None:
            return True
        match self._decoder.decode(frame):
            case WorkerStop():
                socket.close_after_sending(1.0)
                return False
            case SequenceStart() as start:
                self.content.start_sequence(Rank(rank), start)
            case SequenceEnd(seq_ids):
                self.content.end_sequences(Rank(rank), seq_ids)
            case RouteChunk() as chunk:
                self.content.send_routes(Rank(rank), chunk)
            case JoinGroup() as group:
                self._have_step.clear()
                self.groups.append(group)
                socket.send(self._ready(rank, "first life", group.generation))
            case StepDescriptor() as step:
                self._take_step(rank, step, sockets, routes)
            case message:
                answer = self._exchange(rank, message)
                if answer is not None:
                    socket.send(encode(answer))
        return True

    def _take_step(
        self,
        rank: int,
        step: StepDescriptor,
        sockets: dict[int, DealerSocket],
        routes: PushSocket,
    ) -> None:
        self._have_step.add(rank)
        if len(self._have_step) < self._num_ranks:
            return
        self._have_step.clear()
        if self.dies_in_step is None:
            self._execute(step, sockets, routes)
        else:
            self.hang_up(self.dies_in_step)
            self.num_deaths += 1

    def _measure(self, rank: int, message: MeasureWeights) -> WeightsMeasured:
        host, needed, free = self.rooms.get(rank, ("host", 0, 0))
        failure = LoadFailure("no tensors", True) if rank in self.unmeasurable else None
        return WeightsMeasured(rank, message.update_id, host, needed, free, failure)

    def _exchange(
        self, rank: int, message: ToExchangeWeights
    ) -> WeightsMeasured | WeightsPrepared | WeightsCommitted | None:
        match message:
            case MeasureWeights():
                return self._measure(rank, message)
            case PrepareWeights():
                return None if rank in self.silent_loaders else self._prepare(rank, message)
            case CommitWeights(update_id):
                assert self._prepared is not None
                if rank == self.dies_at_commit:
                    self.hang_up(rank)
                    return None
                self.content.root = self._prepared.encode()
                return WeightsCommitted(rank, update_id)
            case DiscardWeights():
                self.num_discards += 1
                return None

    def _prepare(self, rank: int, message: PrepareWeights) -> WeightsPrepared:
        self.num_prepared += 1
        failure = self.load_failures.get(rank)
        self._prepared = message.model_dir
        seen = "others" if rank in self.other_files else message.model_dir
        fingerprint = "" if failure else fingerprint_of(seen)
        return WeightsPrepared(rank, message.update_id, fingerprint, failure)

    def _execute(
        self, step: StepDescriptor, sockets: dict[int, DealerSocket], routes: PushSocket
    ) -> None:
        """Once every rank has the step, every rank has all that was sent before it."""
        self.in_step.set()
        if self.hold_from is not None and len(self.content.steps) >= self.hold_from:
            self.may_answer.clear()
            self.is_held = True
        self.may_answer.wait(PATIENCE)
        for result in self.content.execute(step):
            if result.rank in sockets and result.rank not in self._hang_ups:
                sockets[result.rank].send(encode(result))
        for frame in self.content.frames(0.0):
            routes.send(encode(frame))


def make_submit(request_id: str, prompt: list[int], max_tokens: int, **fields: Any) -> Submit:
    """Greedy. fields: of Submit."""
    sampling = SamplingParams(max_tokens, 0.0, 1.0, None, ())
    return Submit(request_id, np.array(prompt, np.int32), sampling, None, False, **fields)


class Client:
    """One HTTP server's socket, driven by hand."""

    def __init__(self, endpoint: str, identity: str = "http-0") -> None:
        self.socket = DealerSocket(identity, KEYS.http_server)
        self.socket.connect(endpoint)
        self._decoder: Decoder[ToHttpServer] = Decoder(ToHttpServer)
        self.tokens: dict[str, list[int]] = {}
        self.completions: dict[str, Completion] = {}
        self.refusals: dict[str, Refused] = {}
        self.versions: dict[str, set[str]] = {}
        """Of the weights that computed a request's tokens."""

    def send(self, message: ToEngine) -> None:
        self.socket.send(encode(message))

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.send(SubmitAll([make_submit(request_id, prompt, max_tokens)]))

    def receive(self) -> ToHttpServer:
        frame = self.socket.receive(PATIENCE)
        assert frame is not None, "no answer from the engine"
        return self._decoder.decode(frame)

    def answer(self, kind: type[A]) -> A:
        """The next message of this kind; what comes before it is taken in."""
        while not isinstance(message := self.receive(), kind):
            self._take(message)
        self._take(message)
        return message

    def wait_for(self, *request_ids: str) -> None:
        """Until each of these has its completion or its refusal."""
        while not all(i in self.completions or i in self.refusals for i in request_ids):
            self._take(self.receive())

    def wait_for_token(self, request_id: str) -> None:
        while not self.tokens.get(request_id):
            self._take(self.receive())

    def status(self) -> CellStatus:
        self.send(StatusQuery(1))
        return self.answer(CellStatus)

    def _take(self, message: object) -> None:
        match message:
            case Refused(request_id):
                assert request_id not in self.refusals
                self.refusals[request_id] = message
            case OutputBatch(deltas):
                for delta in deltas:
                    self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                    if delta.token_ids:
                        self.versions.setdefault(delta.request_id, set()).add(delta.weight_version)
                    if delta.completion is not None:
                        assert delta.request_id not in self.completions
                        self.completions[delta.request_id] = delta.completion


class ContentCell:
    """A service in a thread, ranks in another one, a client to talk to it. A context manager that ends them all."""

    def __init__(
        self,
        *,
        num_ranks: int = 2,
        ranks_come: bool = True,
        store_class: type[PrefixStore] = PrefixStore,
        step_timeout_seconds: float = PATIENCE,
        max_num_waiting: int = 100,
        max_num_seqs: int = 8,
        load_timeout_seconds: float = PATIENCE,
        journal: StoreJournal | None = None,
        recovery_limit_seconds: float = 0.0,
        life: EngineLife | None = None,
    ) -> None:
        cell = CellSection(
            dispatch="negotiated",
            step_timeout_factor=1.0,
            step_timeout_floor_seconds=step_timeout_seconds,
            start_timeout_seconds=load_timeout_seconds,
            recovery_limit_seconds=recovery_limit_seconds,
        )
        scheduler = SchedulerSection(
            max_num_batched_tokens=16, max_num_seqs=max_num_seqs, max_num_waiting=max_num_waiting
        )
        self.store = store_class(
            num_ranks=num_ranks,
            num_kv_blocks=NUM_KV_BLOCKS,
            block_size=BLOCK_SIZE,
            route_shape=SHAPE,
            score_budget_bytes=num_ranks * NUM_KV_BLOCKS * BLOCK_SIZE * SCORE_BYTES,
            route_budget_bytes=4 * num_ranks * NUM_KV_BLOCKS * BLOCK_SIZE * SHAPE.bytes_per_token,
            kv_bytes_per_block=64,
            journal=journal,
        )
        self.store.load()
        self.checkpoints = NamedCheckpoints()
        self.service = EngineService(
            Config(cell=cell, scheduler=scheduler),
            make_identity(num_ranks),
            ServedShapes(VOCAB, SHAPE, make_namespace),
            store=self.store,
            checkpoint=self.checkpoints,
            compiler=CompilerThread(ExpertPlacement.contiguous(SHAPE.num_experts, num_ranks)),
            address=EngineAddress(HOST, KEYS.engine, life or EngineLife()),
        )
        self.ranks = ContentRanks(self.service, num_ranks)
        self.client = Client(self.service.client_endpoint)
        self.failure: str | None = None
        self.error: Exception | None = None
        self._ranks_come = ranks_come
        self._is_first = life is None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.failure = self.service.run()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        """Waits for the end of the service."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the service did not end"

    def wait_until_ready(self) -> None:
        while not self.client.status().ready:
            pass

    def __enter__(self) -> "ContentCell":
        self._thread.start()
        if self._ranks_come:
            self.ranks.start()
            if self._is_first:
                self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.may_answer.set()
        if self._thread.is_alive():
            self.client.send(Stop("the test ends"))
        self.join()
        if self._ranks_come:
            self.ranks.stop()
        self.client.socket.close()
