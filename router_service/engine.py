"""The step loop: schedule → execute → update. Owner of all requests; single writer of the scheduler and the store.

No sockets here: `engine_service` feeds it and ships what it returns.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from cluster.errors import CellError
from cluster.messages import FeatureStates, Submit
from cluster.prefix_match import Eviction
from cluster.scores import ScoreColumns
from cluster.types import EvictTarget, FinishReason, Rank, SeqId, StepId
from cluster.worker_messages import StepDescriptor, StepResult
from router_service.answer import Answer
from router_service.completion import NOT_FINITE, completion_of
from router_service.engine_limits import EngineLimits
from router_service.engine_parts import EngineParts
from router_service.outbox import ClientDelta, Outbox
from router_service.plans import Plans
from router_service.publisher import Publisher
from router_service.rank_loss import LostRanks, RankLoss
from router_service.request import Request
from router_service.route_outlet import RouteOutlet
from router_service.scheduler import Schedule
from router_service.sequence_start import sequence_start
from router_service.served_weights import ServedWeights, WeightExchange
from router_service.step_builder import build_route_chunk, build_step
from router_service.step_observer import StepTimeline
from router_service.submit_check import check_room, check_submits
from router_service.suspects import BREAKS_RANKS, Suspects

MAX_CHECKED_NODES = 10_000
"""A store with more nodes is not walked through while it is idle: the next request would wait for that."""
PLAN_POLL_SECONDS = 0.02
"""With nothing to do but wait for a plan, clients are served at least so often."""


class Engine:
    """`submit`, `abort` and `finish` only change the sets; `step` does the work. Called from one thread."""

    def __init__(
        self,
        limits: EngineLimits,
        parts: EngineParts,
        *,
        weights: ServedWeights,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._scheduler = parts.scheduler
        self._store = parts.store
        self._workers = parts.workers
        self._weights = weights
        self._draw_seed = draw_seed
        self._clock = clock
        self._plans = parts.plans
        self._features = parts.features
        self._observer = parts.observer
        around = parts.store, limits.block_size, parts.features, parts.observer
        self._publisher = Publisher(*around, first_step=limits.first_step)
        self._outlet = RouteOutlet(limits.route_shape, limits.route_bytes_per_step)
        self._requests: dict[tuple[bytes, str], Request] = {}
        self._by_seq_id: dict[SeqId, Request] = {}
        self._finishing: list[Request] = []
        self._scoring: list[Request] = []
        """Those who wait for the scores of their prompt."""
        self._outbox = Outbox(weights.version)
        self._next_seq_id = 0
        self._next_route_id = 0
        self._rank_loss = RankLoss(parts.scheduler, parts.store, parts.plans, self._publisher)
        self._suspects = Suspects()
        self._open_requests: list[Request] = []
        self._next_step = limits.first_step
        self.num_steps = 0  # that were committed

    # --- from HTTP servers, between steps

    def submit(self, client: bytes, *submits: Submit) -> None:
        """All, or none when it raises OverloadedError or RequestError."""
        check_submits(submits, self._limits, lambda id_: (client, id_) in self._requests)
        if not submits[0].is_again:
            self.check_room(self.num_waiting, len(submits))
        answer = Answer.to(submits)
        for submit in submits:
            self._add(client, submit, answer)

    def check_room(self, num_waiting: int, num_submits: int) -> None:
        """Raises OverloadedError if so many more than those that wait, here or for the end of a step, are too many."""
        check_room(num_waiting, num_submits, self._scheduler.max_num_waiting)

    def _add(self, client: bytes, submit: Submit, answer: Answer) -> None:
        leader = self._requests.get((client, submit.leader_id)) if submit.leader_id else None
        request = Request(
            submit,
            client=client,
            seq_id=SeqId(self._next_seq_id),
            seed=self._seed(submit, leader),
            namespace=self._weights.namespace(submit.tenant, submit.cache_salt),
            block_size=self._limits.block_size,
            route_shape=self._limits.route_shape,
            arrival_seconds=self._clock(),
        )
        request.answer = answer
        self._next_seq_id += 1
        if leader is not None:
            request.follow(leader)
        self._requests[client, submit.request_id] = request
        self._by_seq_id[request.seq_id] = request
        if submit.score_prompt:
            self._scoring.append(request)
        self._outlet.add(request)
        self._scheduler.add(request)

    def _seed(self, submit: Submit, leader: Request | None) -> int:
        if submit.sampling.seed is not None:
            return submit.sampling.seed
        return self._draw_seed() if leader is None else leader.seed

    def abort(self, client: bytes, request_id: str) -> None:
        """Unknown ids are ignored: the request may just have ended. No completion is sent, nobody listens."""
        request = self._requests.get((client, request_id))
        if request is not None:
            self._drop(request, "abort")

    def abort_all(self, client: bytes) -> None:
        """The HTTP server is gone, and all who listened with it."""
        for request in [r for r in self._requests.values() if r.client == client]:
            self._drop(request, "abort")

    def finish(self, client: bytes, request_id: str, num_output_tokens: int) -> None:
        """A stop string was completed by output token `num_output_tokens`."""
        request = self._requests.get((client, request_id))
        if request is None or request.finish_reason is not None:
            return
        if request.stop_at(num_output_tokens):
            self._retire(request, "stop")

    def fail_all(self, reason: str) -> None:
        """Ends every request with an error; workers are told nothing, they may be what failed."""
        requests = list(self._requests.values())
        for request in requests:
            request.error = reason
            self._outbox.tell(request, completion=completion_of(request, "error"))
        # apart, so that all errors are there whatever state the rest is in
        for request in requests:
            self._forget(request, "error")

    def has_request(self, client: bytes, request_id: str) -> bool:
        return (client, request_id) in self._requests

    def evict(self, part: EvictTarget) -> Eviction:
        return self._store.evict(part)

    def settle(self) -> None:
        """Takes what committed steps still owe: what the present weights have computed is told as theirs. Raises
        CellError."""
        self._collect_frames()
        while self._publisher.expected_ranks():
            self._wait_for_frames()

    def exchange_weights(self, fingerprint: str, *, restart: bool) -> WeightExchange:
        """The next step is that of other weights. What has begun ends, to be asked for again if `restart` and nothing
        of its answer was shown; what has not goes on; nothing that the old ones made is left in store or plans."""
        self._weights = replace(self._weights, fingerprint=fingerprint)
        self._outbox.weight_version = self._weights.version
        begun = [r for r in self._requests.values() if r.answer.has_begun]
        again = {r for r in begun if restart and not r.answer.may_be_shown}
        for request in begun:
            request.error = f"the weights were exchanged for {self._weights.version} while it ran"
            completion = completion_of(request, "abort", again=request in again)
            self._outbox.tell(request, completion=completion)
            self._drop(request, "abort")
        for request in self._requests.values():
            request.move_to(self._weights.namespace(request.tenant, request.cache_salt))
        self._plans.clear()
        evicted = self._store.exchange_weights(fingerprint)
        return WeightExchange(len(begun) - len(again), len(again), evicted)

    def set_features(self, **switches: bool | None) -> None:
        """By name, from the next step on; None leaves one as it is. Running requests keep what they have taken."""
        self._features.switch(**switches)

    # --- when a rank is lost

    def discard_step(self) -> None:
        """The step that was under way, if one was, is not: no token of it is known, and its id is not used again."""
        if not self._open_requests:
            return
        computed, self._open_requests = self._open_requests, []
        self._publisher.discard(self._next_step)
        self._next_step = StepId(self._next_step + 1)
        if (to_blame := self._suspects.broke(computed)) is not None:
            self._fail(to_blame, BREAKS_RANKS)

    def lose_ranks(self, ranks: list[Rank]) -> LostRanks:
        """Other processes are these ranks now, and hold nothing. Requests there go back to the queue with the tokens
        and routes that they have; routes and scores in the store stay. No rank holds any plan after the next step."""
        self._collect_frames()
        lost = self._rank_loss.lose(ranks, self._requests.values(), self._next_step)
        self._finishing = [r for r in self._finishing if r.finish_reason is not None]
        self._complete_finished()
        return lost

    @property
    def features(self) -> FeatureStates:
        return self._features.states

    @property
    def weights(self) -> ServedWeights:
        return self._weights

    @property
    def plans(self) -> Plans:
        return self._plans

    # --- the loop

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting or self._finishing)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running) + len(self._finishing)

    def take_deltas(self) -> list[ClientDelta]:
        """What happened since the last call, in order."""
        return self._outbox.take()

    def step(self) -> None:
        """One step of all ranks, or, when nothing can be scheduled, the wait for routes still on their way.

        Raises CellError when the step could not be executed: no token is accepted and nothing published then, and it is
        to be discarded before the next.
        """
        started = self._clock()
        self._outlet.begin_step()
        self._collect_frames()
        self._plans.pump()
        schedule = self._schedule()
        if not schedule.chunks:
            if not schedule.admitted and not self._outlet.is_exhausted:
                self._wait(schedule)
            return
        scheduled = self._clock()
        descriptor = self._build(schedule)
        built = self._clock()
        self._open_requests = [chunk.request for chunk in schedule.chunks]
        results = self._workers.execute(descriptor)
        executed = self._clock()
        computed, self._open_requests = self._open_requests, []
        self._suspects.passed(computed)
        self._update(schedule, results)
        timeline = StepTimeline(
            schedule=scheduled - started,
            build=built - scheduled,
            execute=executed - built,
            update=self._clock() - executed,
        )
        self._observer.committed(schedule, results, timeline)

    def _schedule(self) -> Schedule:
        schedule = self._scheduler.schedule(self._suspects.alone)
        for rank, request in schedule.preempted:
            self._workers.end_sequences(rank, [request.seq_id])
            self._observer.preempted(request)
        for request in schedule.admitted:
            self._announce(request)
        for request in schedule.admitted:
            self._retire_if_done(request)
        self._complete_finished()
        return schedule

    def _announce(self, request: Request) -> None:
        assert request.home_rank is not None
        request.answer.has_begun = True
        self._observer.admitted(request)
        self._workers.start_sequence(request.home_rank, sequence_start(request))

    def _build(self, schedule: Schedule) -> StepDescriptor:
        """The step as one message; the routes that it replays are sent ahead."""
        step_id = self._next_step
        route_ids = []
        for chunk in schedule.chunks:
            route_id = -1
            if chunk.replays and not chunk.fragment_ids:
                route_id = self._next_route_id
                self._next_route_id += 1
                assert chunk.request.home_rank is not None
                self._workers.send_routes(
                    chunk.request.home_rank, build_route_chunk(route_id, step_id, chunk)
                )
            route_ids.append(route_id)
        return build_step(
            step_id,
            schedule.chunks,
            route_ids,
            placement_epoch=self._limits.placement_epoch,
            dispatch=self._limits.dispatch,
            evicted_fragment_ids=self._plans.take_evicted(),
        )

    def _update(self, schedule: Schedule, results: list[StepResult]) -> None:
        """Commits: tokens become known, KV and routes of full blocks are published as they are complete."""
        step_id = self._next_step
        self._next_step = StepId(step_id + 1)
        self.num_steps += 1
        for chunk in schedule.chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
        self._publisher.expect(step_id, schedule.chunks)
        self._scheduler.note_compiling({s for r in results for s in r.compiling_seq_ids})
        for result in results:
            for seq_id in result.poisoned_seq_ids:
                self._poison(self._by_seq_id[SeqId(seq_id)])
            for failure in result.failures:
                request = self._by_seq_id[SeqId(failure.seq_id)]
                self._fail(request, failure.reason, is_at_fault=True)
            sampled = zip(result.seq_ids, result.token_ids, result.scores.split(), strict=True)
            for seq_id, token_id, score in sampled:
                self._accept(self._by_seq_id[SeqId(seq_id)], token_id, score)
        for chunk in schedule.chunks:
            self._publisher.publish(chunk.request)
            self._retire_if_done(chunk.request)
        self._collect_frames()

    def _retire_if_done(self, request: Request) -> None:
        """A request that generates nothing (more) ends with the last token that it needs."""
        if request.generates or request.num_uncomputed_tokens or request.finish_reason is not None:
            return
        self._retire(request, request.end_reason or "length")

    def _accept(self, request: Request, token_id: int, score: ScoreColumns) -> None:
        if request.finish_reason is not None:
            return
        request.append_token(token_id, score)
        self._observer.token(request, self._clock())
        self._outbox.tell(
            request,
            token_ids=[token_id],
            scores=score if request.return_scores else None,
        )
        if token_id in request.sampling.stop_token_ids:
            self._retire(request, "stop")
        elif request.num_output_tokens >= request.sampling.max_tokens:
            self._retire(request, "length")

    def _poison(self, request: Request) -> None:
        request.publishing = False
        self._fail(request, NOT_FINITE)

    def _fail(self, request: Request, reason: str, *, is_at_fault: bool = False) -> None:
        request.error, request.is_at_fault = reason, is_at_fault
        self._retire(request, "error")

    def _retire(self, request: Request, reason: FinishReason) -> None:
        """Ends generation. The completion follows when the request's full blocks can be matched."""
        request.finish_reason = reason
        if request in self._scheduler.running:
            self._scheduler.retire(request)
        else:
            self._scheduler.remove(request)
        self._finishing.append(request)

    # --- routes arrive, requests end

    def _collect_frames(self) -> None:
        """Takes what has arrived."""
        for frame in self._workers.frames(0.0):
            self._publisher.take(frame)
        self._complete_finished()

    def _tell_prompt_scores(self) -> None:
        """To those whose prompt is scored now."""
        for request in [r for r in self._scoring if r.was_admitted and r.score_log.is_complete]:
            self._scoring.remove(request)
            self._outbox.tell(request, prompt_scores=request.score_log.prompt_columns())

    def _wait(self, schedule: Schedule) -> None:
        if schedule.awaits_plans:
            self._plans.wait(PLAN_POLL_SECONDS)
        elif not self._suspects.pass_over():
            self._wait_for_frames()

    def _wait_for_frames(self) -> None:
        """Nothing can be scheduled until routes arrive that are on their way."""
        ranks = self._publisher.expected_ranks()
        if not ranks:
            assert not self.has_work, "requests wait, nothing runs and no routes are on their way"
            return
        frames = self._workers.frames(self._limits.frame_timeout_seconds)
        if not frames:
            raise CellError(
                f"no routes from rank {', '.join(map(str, ranks))} within "
                f"{self._limits.frame_timeout_seconds:.1f} s after a committed step"
            )
        for frame in frames:
            self._publisher.take(frame)
        self._complete_finished()

    def _complete_finished(self) -> None:
        self._tell_prompt_scores()
        for request, part in self._outlet.next_parts():
            self._outbox.tell(request, routes=part)
        ready = [r for r in self._finishing if self._outlet.is_complete(r)]
        for request in ready:
            self._finishing.remove(request)
            self._complete(request)

    def _complete(self, request: Request) -> None:
        reason = request.finish_reason
        assert reason is not None
        self._outbox.tell(request, completion=completion_of(request, reason))
        self._drop(request, reason)

    def _drop(self, request: Request, reason: FinishReason) -> None:
        """Forgets a request, here and at its rank."""
        rank = request.home_rank
        self._forget(request, reason)
        if rank is not None:
            self._workers.end_sequences(rank, [request.seq_id])

    def _forget(self, request: Request, reason: FinishReason) -> None:
        """Blocks and lease go back."""
        request.finish_reason = reason
        if request in self._finishing:
            self._finishing.remove(request)
        if request in self._scoring:
            self._scoring.remove(request)
        self._scheduler.remove(request)
        self._publisher.forget(request)
        self._outlet.forget(request)
        del self._requests[request.client, request.request_id]
        del self._by_seq_id[request.seq_id]
        self._observer.finished(request, reason, self._clock())

    def check_invariants(self) -> None:
        """Raises AssertionError. With no request left, no block and no lease is held."""
        stats = self._store.stats()
        if stats.num_nodes <= MAX_CHECKED_NODES:
            self._store.check_invariants()
        if not self._requests:
            assert not self.has_work, "requests are gone but the scheduler holds some"
            assert stats.kv_blocks_leased == 0, f"{stats.kv_blocks_leased} blocks leased by nobody"
