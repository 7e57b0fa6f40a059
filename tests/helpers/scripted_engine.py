"""An engine that says what a test told it to, behind a real ZeroMQ ROUTER on a thread of its own.

It keeps the contract of the real one: one delta per step, end at a stop id or at max_tokens, cut by Finish, quiet after
Abort, routes from position 0.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec
import numpy as np
import zmq

from cluster.channel import RouterSocket
from cluster.errors import CellError
from cluster.messages import (
    Abort,
    CellStatus,
    Completion,
    EvictCommand,
    EvictReport,
    FeaturesCommand,
    FeaturesReport,
    FeatureStates,
    Finish,
    MetricsQuery,
    MetricsText,
    OutputBatch,
    OutputDelta,
    Refused,
    RoutePart,
    StatusQuery,
    Submit,
    SubmitAll,
    ToEngine,
    ToHttpServer,
)
from cluster.rank_place import RankPlace
from cluster.scores import ScoreColumns
from cluster.types import FinishReason
from cluster.wire import Decoder, encode

NUM_MOE_LAYERS, NUM_EXPERTS_PER_TOK = 2, 4
ROUTE_PART_TOKENS = 5


def scripted_rank(token_id: int) -> int:
    return 1 if token_id % 2 else 100 + token_id


def scripted_score(token_id: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-prob and alternatives. A token with an odd id is the likeliest, one with an even id is none of those."""
    first = token_id if token_id % 2 else token_id + 1
    return -token_id / 64, [(first + place, -(place + 1) / 128) for place in range(num_top)]


def _prompt_scores(submit: Submit) -> ScoreColumns:
    """With the alternatives that were asked for."""
    asked = msgspec.structs.replace(
        submit, return_scores=True, num_top_logprobs=submit.num_prompt_alternatives
    )
    scores = _scores(asked, submit.prompt_token_ids[1:].tolist())
    assert scores is not None
    return scores


def _scores(submit: Submit, token_ids: list[int]) -> ScoreColumns | None:
    if not submit.return_scores:
        return None
    num_top = submit.num_top_logprobs
    scores = [scripted_score(token_id, num_top) for token_id in token_ids]
    listed = [pair for _, alternatives in scores for pair in alternatives]
    return ScoreColumns(
        np.array([logprob for logprob, _ in scores], np.float32),
        np.array([scripted_rank(token_id) for token_id in token_ids], np.int32),
        np.full(len(token_ids), num_top, np.int32),
        np.array([token_id for token_id, _ in listed], np.int32),
        np.array([logprob for _, logprob in listed], np.float32),
    )


_ERRORS: dict[FinishReason, str] = {
    "error": "router logits are not finite",
    "abort": "the weights were exchanged for 89ab while it ran",
}


@dataclass
class _Active:
    peer: bytes
    submit: Submit
    num_sent: int = 0
    num_steps: int = 0


@dataclass
class ScriptedEngine:
    """token_ids: what every request generates, again and again until its end.

    answers: token ids for prompts that have their own; keys are prompts as tuples.
    step_seconds: time between two steps. held: while true nothing advances, as if all were queued.
    """

    token_ids: Sequence[int] = (70, 71, 72)
    answers: dict[tuple[int, ...], Sequence[int]] = field(default_factory=dict)
    tokens_per_step: int = 1
    step_seconds: float = 0.0
    held: bool = False
    deaf: bool = False
    """Takes messages and answers nothing."""
    ready: bool = True
    refuse_as: str | None = None
    refused_field: str | None = None
    evict_failure: str = ""
    error_after: int | None = None
    """Ends each request with an error after this many tokens."""
    error_reason: FinishReason = "error"
    """How it ends then; "abort": the weights were exchanged."""
    blames_request: bool = False
    """For that error."""
    prompt_score_delay: int = 0
    """Steps after which the scores of a prompt are told."""
    choice_answers: dict[int, Sequence[int]] = field(default_factory=dict)
    """Token ids for choices that have their own, by number."""
    route_dims: tuple[int, int] = (NUM_MOE_LAYERS, NUM_EXPERTS_PER_TOK)
    route_part_tokens: int = ROUTE_PART_TOKENS
    cached_tokens: int = 0
    replayed_tokens: int = 0
    submits: list[Submit] = field(default_factory=list)
    peers: set[bytes] = field(default_factory=set)
    """HTTP servers that have submitted something."""
    aborts: list[str] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    num_status_queries: int = 0
    stalls_after: int | None = None
    """Output tokens of a request that are told; no more until this changes."""
    at: str | None = None
    """The endpoint of one that is gone; None: any."""
    weight_version: str = "0123456789abcdef"
    features: FeatureStates = field(default_factory=lambda: FeatureStates(True, True, True))

    def __enter__(self) -> Self:
        self._socket = RouterSocket()
        self.endpoint = self.at or self._socket.bind("127.0.0.1")
        if self.at is not None:
            wait_until(self._takes_over)
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)
        self._active: dict[str, _Active] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scripted-engine")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(timeout=10)
        self._socket.close()

    def _takes_over(self) -> bool:
        """The one before it lets go of its port in a thread of ZeroMQ's."""
        try:
            self._socket.socket.bind(self.endpoint)
        except zmq.ZMQError:
            return False
        return True

    def finish_of(self, request_id: str) -> Finish:
        """Waits until it is here: the HTTP server's client may have its answer before."""
        wait_until(lambda: any(finish.request_id == request_id for finish in self.finishes))
        return next(finish for finish in self.finishes if finish.request_id == request_id)

    @property
    def num_told(self) -> list[int]:
        """Output tokens of those that are active."""
        return [active.num_sent for active in list(self._active.values())]

    @property
    def num_active(self) -> int:
        return len(self._active)

    def _run(self) -> None:
        while not self._stopping:
            moving = bool(self._active) and not self.held
            received = self._socket.receive(self.step_seconds if moving else 0.02)
            if received is not None:
                self._handle(*received)
            elif moving:
                self._step()

    def _handle(self, peer: bytes, frame: bytes) -> None:
        message = self._decoder.decode(frame)
        match message:
            case SubmitAll(submits):
                self._submit(peer, submits)
            case Abort(request_id):
                self._active.pop(request_id, None)
                self.aborts.append(request_id)  # last: who waits for it sees the rest
            case Finish(request_id, num_output_tokens):
                self.finishes.append(message)
                active = self._active.get(request_id)
                if active is not None:
                    self._end(active, [], "stop", num_output_tokens)
            case StatusQuery(query_id):
                self.num_status_queries += 1
                self._send(peer, self._status(query_id))
            case MetricsQuery(query_id):
                self._send(peer, MetricsText(query_id, b"pointsman_steps_total 7\n"))
            case EvictCommand(query_id, part):
                self._send(peer, EvictReport(query_id, part, 3, 4096, 1, self.evict_failure))
            case FeaturesCommand(query_id):
                self.features = _switched(self.features, message)
                self._send(peer, FeaturesReport(query_id, self.features))

    def _submit(self, peer: bytes, submits: list[Submit]) -> None:
        self.submits += submits
        self.peers.add(peer)
        if self.refuse_as is not None:
            first = submits[0].request_id
            self._send(
                peer, Refused(first, self.refuse_as, "the queue is full", self.refused_field)
            )
            return
        for submit in submits:
            told = submit.output_token_ids
            num_told = 0 if told is None else len(told)
            self._active[submit.request_id] = _Active(peer, submit, num_told)

    def _step(self) -> None:
        for active in list(self._active.values()):
            self._advance(active)

    def _advance(self, active: _Active) -> None:
        submit, sampling = active.submit, active.submit.sampling
        if submit.score_prompt and active.num_steps == self.prompt_score_delay:
            scores = _prompt_scores(submit)
            self._send_delta(active, OutputDelta(submit.request_id, [], None, None, scores))
        active.num_steps += 1
        if submit.score_prompt and active.num_steps <= self.prompt_score_delay:
            return
        if active.num_sent >= sampling.max_tokens:
            self._end(active, [], "length", active.num_sent)
            return
        if self.stalls_after is not None and active.num_sent >= self.stalls_after:
            return
        script = self.choice_answers.get(submit.choice) or self.answers.get(
            tuple(submit.prompt_token_ids.tolist()), self.token_ids
        )
        new: list[int] = []
        for _ in range(self.tokens_per_step):
            if self.error_after is not None and active.num_sent >= self.error_after:
                self._end(active, new, self.error_reason, active.num_sent)
                return
            new.append(script[active.num_sent % len(script)])
            active.num_sent += 1
            if new[-1] in sampling.stop_token_ids or active.num_sent == sampling.max_tokens:
                reason: FinishReason = "stop" if new[-1] in sampling.stop_token_ids else "length"
                self._end(active, new, reason, active.num_sent)
                return
        self._send_delta(active, OutputDelta(submit.request_id, new, None, _scores(submit, new)))

    def _end(
        self, active: _Active, new: list[int], reason: FinishReason, num_output_tokens: int
    ) -> None:
        submit = active.submit
        completion = Completion(
            finish_reason=reason,
            error=_ERRORS.get(reason),
            num_output_tokens=num_output_tokens,
            cached_tokens=self.cached_tokens,
            replayed_tokens=self.replayed_tokens,
            is_at_fault=reason == "error" and self.blames_request,
        )
        if submit.return_routes:
            self._send_routes(active, len(submit.prompt_token_ids) + num_output_tokens - 1)
        del self._active[submit.request_id]
        delta = OutputDelta(submit.request_id, new, completion, _scores(submit, new))
        self._send_delta(active, delta)

    def _send_routes(self, active: _Active, num_inputs: int) -> None:
        """What was asked, in parts; one that is empty where that is nothing."""
        submit = active.submit
        end = num_inputs if submit.routes_end is None else min(num_inputs, submit.routes_end)
        ids, weights = scripted_routes(num_inputs, self.route_dims)
        most = self.route_part_tokens
        starts = range(submit.routes_start, max(end, submit.routes_start + 1), most)
        for start in starts:
            part = slice(start, max(start, min(end, start + most)))
            told = weights[part] if submit.return_route_weights else None
            routes = RoutePart(start, ids[part], told)
            self._send_delta(active, OutputDelta(submit.request_id, [], None, routes=routes))

    def _send_delta(self, active: _Active, delta: OutputDelta) -> None:
        named = msgspec.structs.replace(delta, weight_version=self.weight_version)
        self._send(active.peer, OutputBatch([named]))

    def _send(self, peer: bytes, message: ToHttpServer) -> None:
        if self.deaf:
            return
        try:
            self._socket.send(peer, encode(message))
        except CellError:
            self._active = {k: a for k, a in self._active.items() if a.peer != peer}

    def _status(self, query_id: int) -> CellStatus:
        return CellStatus(
            query_id=query_id,
            ready=self.ready,
            reason="" if self.ready else "rank 2 is lost",
            ep_size=4,
            placement_epoch=0,
            dispatch="negotiated",
            num_waiting=0,
            num_running=len(self._active),
            kv_blocks_free=[8] * 4,
            kv_blocks_used=[0] * 4,
            kv_blocks_leased=0,
            store_nodes=0,
            store_bytes={"kv": 0, "routes": 0},
            steps_total=7,
            features=self.features,
            weight_version=self.weight_version,
            places=[RankPlace("127.0.0.1", "cpu")] * 4,
        )


def _switched(features: FeatureStates, command: FeaturesCommand) -> FeatureStates:
    names = FeatureStates.__struct_fields__
    asked = {name: getattr(command, name) for name in names}
    return msgspec.structs.replace(features, **{n: v for n, v in asked.items() if v is not None})


def scripted_routes(
    num_tokens: int, dims: tuple[int, int] = (NUM_MOE_LAYERS, NUM_EXPERTS_PER_TOK)
) -> tuple[np.ndarray, np.ndarray]:
    """[num_tokens, *dims] uint8 ids and float32 weights, different at each position."""
    shape = (num_tokens, *dims)
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return (numbers % 251).astype(np.uint8), (numbers / 7).astype(np.float32)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns once the condition holds; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
