"""One client generation: ordered integers and derived properties (idea: mini-sglang, vLLM: no phases).

0 ─── num_reused_tokens                                      tokens whose KV was there when it started
0 ─── num_computed_tokens ─── num_tokens                     tokens that are done with, tokens known
0 ─── num_published_tokens ≤ min(num_computed, num_recorded) full blocks that the store has
0 ─── num_recorded_tokens                                    tokens whose routes are known: replayed if computed again
"""

import hashlib
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cluster.messages import SamplingParams, Submit
from cluster.prefix_match import Lease
from cluster.routes import ExpertRoutes, RouteShape
from cluster.scores import ScoreColumns
from cluster.types import BlockId, FinishReason, Namespace, Rank, SeqId
from router_service.answer import Answer
from router_service.score_log import ScoreLog

Int32Array = npt.NDArray[np.int32]
_KEY_BYTES = 12


class RouteLog:
    """The routes of a request's own tokens from position 0. They never change once made."""

    def __init__(self, shape: RouteShape) -> None:
        self._shape = shape
        self._parts: list[ExpertRoutes] = []
        self.num_tokens = 0

    def append(self, routes: ExpertRoutes) -> None:
        if routes.num_tokens:
            self._parts.append(routes)
            self.num_tokens += routes.num_tokens

    def num_same_tokens(self, others: ExpertRoutes) -> int:
        """Leading tokens of `others`, which start at position 0, that have the same expert ids here."""
        mine = self.slice(0, others.num_tokens)
        differs = (mine.topk_ids != others.topk_ids).any(axis=(1, 2))
        return int(differs.argmax()) if differs.any() else others.num_tokens

    def slice(self, start: int, end: int) -> ExpertRoutes:
        """Routes of tokens [start, end). Copies only where the range crosses parts."""
        picked = []
        position = self.num_tokens
        for part in reversed(self._parts):  # what is asked for is nearly always at the end
            position -= part.num_tokens
            if position < end and position + part.num_tokens > start:
                picked.append(part.slice(max(start - position, 0), end - position))
            if position <= start:
                break
        return ExpertRoutes.concatenate(picked[::-1], self._shape)


class Request:
    """Owner: the engine. Everything else holds the seq_id or the request while a call lasts."""

    def __init__(
        self,
        submit: Submit,
        *,
        client: bytes,
        seq_id: SeqId,
        seed: int,
        namespace: Namespace,
        block_size: int,
        route_shape: RouteShape,
        arrival_seconds: float,
    ) -> None:
        self.request_id = submit.request_id
        self.client = client
        self.seq_id = seq_id
        self.seed = seed
        self.choice = submit.choice
        self._leader: Request | None = None
        self.answer = Answer(submit.is_streamed)
        """Shared with what was asked for with it."""
        self.tenant = submit.tenant
        self.cache_salt = submit.cache_salt
        self.namespace = namespace
        self.sampling: SamplingParams = submit.sampling
        self.return_routes = submit.return_routes
        self.routes_start, self.routes_end = submit.routes_start, submit.routes_end
        self.returns_route_weights = submit.return_route_weights
        self.recompute_prompt = submit.recompute_prompt
        self.num_top_logprobs = max(submit.num_top_logprobs, submit.num_prompt_alternatives)
        self.return_scores = submit.return_scores
        self.priority = submit.priority
        self.arrival_seconds = arrival_seconds
        self.last_token_seconds = None if submit.output_token_ids is None else arrival_seconds
        self._block_size = block_size

        told = submit.output_token_ids
        self.num_prompt_tokens = len(submit.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + (0 if told is None else len(told))
        capacity = self.num_prompt_tokens + submit.sampling.max_tokens
        self._tokens = np.empty(capacity, np.int32)
        self._tokens[: self.num_prompt_tokens] = submit.prompt_token_ids
        if told is not None:
            self._tokens[self.num_prompt_tokens : self.num_tokens] = told
        self.score_log = ScoreLog(
            self.num_prompt_tokens,
            scores_prompt=submit.score_prompt,
            num_alternatives=submit.num_prompt_alternatives,
        )

        self.home_rank: Rank | None = None
        self.lease: Lease | None = None
        self._block_table = np.empty(-(-capacity // block_size), np.int32)
        self.num_blocks = 0
        self.private_blocks: set[BlockId] = set()
        self.num_reused_tokens = 0
        self.replays_reused = True
        """Of those that are computed again for their hidden states: by their routes, else by the gate."""
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.num_offered_blocks = 0
        """Full blocks that the store was asked to take; what it refused of them stays private."""
        self.publishing = True
        self.route_log = RouteLog(route_shape)
        self.num_pending_frames = 0

        self.was_admitted = False
        self.is_resumed = told is not None
        """An engine that is lost had begun it; until that is in the metrics."""
        self.prompt_sources = submit.prompt_sources
        """Known from the first admission on, here or by an engine that is lost."""
        self.counted = submit.prompt_sources is not None
        """Its prompt tokens are in the metrics."""
        self.unreplayed_tokens = 0
        """Prompt tokens whose recorded routes are not used because replay is off."""
        self.finish_reason: FinishReason | None = None
        self.end_reason: FinishReason | None = self._reason_to_end()
        """With this it had ended when its rank or engine was lost, before all was there that its client asked for."""
        self.error: str | None = None
        self.awaits_grammar = False
        """Its home rank may still compile it, as far as is known."""
        self.is_at_fault = False
        """See Completion."""
        self.num_final_output_tokens: int | None = None

    @property
    def precedence(self) -> tuple[int, SeqId]:
        """The smaller goes first: by priority, first come, first served among equals."""
        return self.priority, self.seq_id

    # --- tokens

    @property
    def token_ids(self) -> Int32Array:
        """[num_tokens] int32 view: prompt and output."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def _reason_to_end(self) -> FinishReason | None:
        """Of the output that is known: after its last token none comes."""
        if not self.num_output_tokens:
            return None
        if self._tokens[self.num_tokens - 1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.sampling.max_tokens else None

    @property
    def generates(self) -> bool:
        return self.sampling.max_tokens > 0 and self.end_reason is None

    @property
    def num_uncomputed_tokens(self) -> int:
        return max(0, self._num_tokens_to_compute - self.num_computed_tokens)

    @property
    def _num_tokens_to_compute(self) -> int:
        """All; of a request that generates nothing those from which its last score or its last routes come."""
        if self.generates:
            return self.num_tokens
        needs_routes = self.return_routes and self.num_recorded_tokens < self.num_tokens - 1
        return 0 if self.score_log.is_complete and not needs_routes else self.num_tokens - 1

    @property
    def num_recorded_tokens(self) -> int:
        return self.route_log.num_tokens

    @property
    def first_needed_token(self) -> int:
        """From here on hidden states are needed; of the tokens before, KV is enough."""
        if self.recompute_prompt and not self.num_output_tokens:
            return 0
        if self.score_log.is_complete:
            return self.num_tokens
        return self.score_log.num_scored_prompt_tokens - 1

    @property
    def replays_next(self) -> bool:
        """The next token to compute takes the experts that are recorded."""
        first = self.num_computed_tokens
        is_again = first < self.num_reused_tokens
        return first < self.num_recorded_tokens and (self.replays_reused or not is_again)

    def append_token(self, token_id: int, score: ScoreColumns) -> None:
        """score: of this token alone."""
        self._tokens[self.num_tokens] = token_id
        self.score_log.add_output(self.num_tokens, score)
        self.num_tokens += 1

    @cached_property
    def prompt_block_keys(self) -> list[bytes]:
        """One key per full prompt block that names it with everything before it (chained, content-defined)."""
        keys = []
        key = str(self.namespace).encode()
        data = self._tokens[: self.num_prompt_tokens].astype("<i4").tobytes()
        width = 4 * self._block_size
        for end in range(width, len(data) + 1, width):
            key = hashlib.blake2b(key + data[end - width : end], digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return keys

    def stop_at(self, num_output_tokens: int) -> bool:
        """Nothing is generated any more. True if it ends at once; else something of what its client asked for was lost
        with a rank or an engine, is computed again, and ends it when it is there."""
        self.num_final_output_tokens = min(num_output_tokens, self.num_output_tokens)
        if not self.num_output_tokens:
            return True
        self.end_reason = "stop"
        return not self.num_uncomputed_tokens

    def end_later(self) -> bool:
        """Its rank is lost with something of what its client asked for. True if there is such a thing: then it is
        computed again, and ends for its old reason when it is there."""
        reason, self.end_reason = self.finish_reason, self.finish_reason
        if not self.num_uncomputed_tokens:
            self.end_reason = None
            return False
        assert reason is not None
        self.finish_reason = None
        return True

    def move_to(self, namespace: Namespace) -> None:
        """Before it has begun: nothing was taken from where it was."""
        assert not self.was_admitted
        self.namespace = namespace
        self.__dict__.pop("prompt_block_keys", None)

    # --- choices of one prompt

    def follow(self, leader: "Request") -> None:
        """This is another choice of the leader's prompt, whose tokens count once. One that has output began before,
        beside it or behind it: then both go on for themselves."""
        self.counted = True
        if not self.num_output_tokens:
            self._leader = leader

    @property
    def awaits_leader(self) -> bool:
        """Choice 0 computes the prompt for all, and its routes are still to come."""
        leader = self._leader
        if leader is None or leader.num_recorded_tokens >= self._num_shared_routes:
            return False
        return leader.finish_reason is None or leader.num_pending_frames > 0

    def take_from_leader(self) -> None:
        """The routes of the prompt, which are this choice's own from now on; once, when they are known or lost."""
        leader, self._leader = self._leader, None
        if leader is not None and leader.num_recorded_tokens >= self._num_shared_routes:
            num_tokens = min(leader.num_recorded_tokens, self.num_prompt_tokens)
            self.route_log.append(leader.route_log.slice(0, num_tokens))

    @property
    def _num_shared_routes(self) -> int:
        """Of the prompt, whose last token is computed only to generate."""
        return self.num_prompt_tokens - (not self.generates)

    # --- blocks

    @property
    def block_table(self) -> Int32Array:
        """[num_blocks] int32 view."""
        return self._block_table[: self.num_blocks]

    def num_missing_blocks(self, num_tokens: int) -> int:
        """Blocks to add so that the first `num_tokens` tokens have a slot."""
        return max(0, -(-num_tokens // self._block_size) - self.num_blocks)

    def add_blocks(self, block_ids: list[BlockId], *, private: bool) -> None:
        self._block_table[self.num_blocks : self.num_blocks + len(block_ids)] = block_ids
        self.num_blocks += len(block_ids)
        if private:
            self.private_blocks.update(block_ids)

    def clear_blocks(self) -> None:
        self.num_blocks = 0
        self.private_blocks.clear()
        self.num_reused_tokens = 0
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.num_offered_blocks = 0

    @property
    def num_publishable_blocks(self) -> int:
        """Full blocks with KV and recorded routes."""
        return min(self.num_computed_tokens, self.num_recorded_tokens) // self._block_size
