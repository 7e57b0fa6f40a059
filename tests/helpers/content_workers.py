"""Expert workers without a model, for engine tests: every KV slot holds a digest of all that it depends on.

A token's digest covers the digest of the slot before it, the token and the experts that it used. The next token and
the experts that a gate would choose are functions of that digest. So a wrong block table, a block reused too early, a
replay with other experts or a token computed twice differently changes the output, as it would in a model.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cluster.errors import RankLostError
from cluster.routes import ExpertRoutes, RouteShape
from cluster.scores import ScoreColumns
from cluster.types import Rank
from cluster.worker_messages import (
    LateFrame,
    RouteChunk,
    RouteFrame,
    ScoreFrame,
    SentTraffic,
    SequenceStart,
    StepDescriptor,
    StepResult,
    StepTimings,
)

VOCAB = 97
SHAPE = RouteShape(num_moe_layers=2, num_experts_per_tok=2, num_experts=8)
ROOT = b"root"
"""Stands for the weights: everything depends on it."""


def gate_routes(digest: bytes) -> np.ndarray:
    """[L, K] uint8, sorted by id: what the gate chooses for the token with this digest before its experts."""
    draws = hashlib.blake2b(b"gate" + digest, digest_size=4).digest()
    first = np.array([draws[0] % 4, draws[1] % 4])
    second = np.array([4 + draws[2] % 4, 4 + draws[3] % 4])
    return np.stack([first, second], axis=1).astype(np.uint8)


def hidden_of(previous: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(previous + int(token_id).to_bytes(4, "little"), digest_size=8).digest()


def slot_content(hidden: bytes, topk_ids: np.ndarray) -> bytes:
    return hashlib.blake2b(hidden + topk_ids.tobytes(), digest_size=8).digest()


def next_token(content: bytes) -> int:
    return int.from_bytes(content[:4], "little") % VOCAB


Score = tuple[float, int, int, float]
"""Log-prob and rank of a token, the likeliest one there and its log-prob."""


def score_of(content: bytes, token_id: int) -> Score:
    """Of the token after the one with this content."""
    top = -int(content[4]) / 512
    chosen = top if token_id == next_token(content) else top - 1 - token_id / VOCAB
    rank = 1 + (token_id - next_token(content)) % VOCAB
    return float(np.float32(chosen)), rank, next_token(content), float(np.float32(top))


def columns_of(scores: list[Score], num_top: int = 1) -> ScoreColumns:
    """Further alternatives than the first one are the ids after it, each less likely by one."""
    places = range(num_top)
    return ScoreColumns(
        np.array([chosen for chosen, _, _, _ in scores], np.float32),
        np.array([rank for _, rank, _, _ in scores], np.int32),
        np.full(len(scores), num_top, np.int32),
        np.array([(top_id + i) % VOCAB for _, _, top_id, _ in scores for i in places], np.int32),
        np.array([top - i for _, _, _, top in scores for i in places], np.float32),
    )


def score_oracle(known: list[int], root: bytes = ROOT) -> list[Score]:
    """Scores of all tokens from the second on, of a sequence that is computed by the gate."""
    content, scores = root, []
    for token_id, following in pairwise(known):
        hidden = hidden_of(content, token_id)
        content = slot_content(hidden, gate_routes(hidden))
        scores.append(score_of(content, following))
    return scores


def oracle(prompt: list[int], num_tokens: int, root: bytes = ROOT) -> tuple[list[int], np.ndarray]:
    """Greedy continuation and the routes [prompt + num_tokens - 1, L, K] of an undisturbed run alone."""
    content, routes, output = root, [], []
    known = list(prompt)
    position = 0
    while len(output) < num_tokens:
        hidden = hidden_of(content, known[position])
        routes.append(gate_routes(hidden))
        content = slot_content(hidden, routes[-1])
        position += 1
        if position == len(known):
            output.append(next_token(content))
            known.append(output[-1])
    return output, np.stack(routes)


@dataclass
class StepRecord:
    """What a test may look at: the tokens of one step by rank."""

    gate_tokens: dict[int, int]
    replayed_tokens: dict[int, int]


@dataclass
class ContentWorkers:
    """Implements the engine's Workers protocol in this process.

    frame_delay: route frames become visible only so many calls of `frames` later.
    """

    num_ranks: int
    block_size: int
    frame_delay: int = 0
    dead_rank: int | None = None
    """Steps are sent to all, and fail."""
    does_share: bool = False
    """Of a failing step every rank does its share all the same, and sends what follows it."""
    breakers: set[int] = field(default_factory=set)
    """Sequences that no step survives."""
    root: bytes = ROOT
    poisoned: set[int] = field(default_factory=set)
    steps: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kv: dict[tuple[int, int], bytes] = {}
        self._routes: dict[tuple[int, int], RouteChunk] = {}
        self._frames: deque[tuple[int, LateFrame]] = deque()
        self._calls = 0
        self.sequences: set[tuple[int, int]] = set()
        self._num_top: dict[tuple[int, int], int] = {}
        self.starts: list[SequenceStart] = []
        """Of all sequences so far."""

    def start_sequence(self, rank: Rank, start: SequenceStart) -> None:
        assert (rank, start.seq_id) not in self.sequences
        self.sequences.add((rank, start.seq_id))
        self.starts.append(start)
        self._num_top[rank, start.seq_id] = start.num_top_logprobs

    def end_sequences(self, rank: Rank, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.sequences.discard((rank, seq_id))

    def send_routes(self, rank: Rank, chunk: RouteChunk) -> None:
        self._routes[rank, chunk.route_id] = chunk

    def execute(self, step: StepDescriptor) -> list[StepResult]:
        if self.dead_rank is not None and not self.does_share:
            raise RankLostError(self.dead_rank, "killed by the test")
        if self.breakers & set(step.seq_ids.tolist()):
            raise RankLostError(0, "broken by a sequence")
        self.steps.append(StepRecord({}, {}))
        results = [self._execute_rank(rank, step) for rank in range(self.num_ranks)]
        self._routes.clear()
        if self.dead_rank is not None:
            raise RankLostError(self.dead_rank, "killed by the test")
        return results

    def lose_rank(self, rank: int, num_frames: int) -> None:
        """Another process is this rank. Of its frames so many arrive late and the others never."""
        self._kv = {key: content for key, content in self._kv.items() if key[0] != rank}
        self.sequences = {key for key in self.sequences if key[0] != rank}
        late = [entry for entry in self._frames if entry[1].rank == rank][:num_frames]
        self._frames = deque(e for e in self._frames if e[1].rank != rank or e in late)

    def frames(self, timeout_seconds: float) -> list[LateFrame]:
        self._calls += self.frame_delay + 1 if timeout_seconds else 1
        ready = []
        while self._frames and self._frames[0][0] <= self._calls:
            ready.append(self._frames.popleft()[1])
        return ready

    def _execute_rank(self, rank: int, step: StepDescriptor) -> StepResult:
        sampled: list[tuple[int, int]] = []
        sampled_scores: list[ScoreColumns] = []
        asked: list[tuple[int, list[Score]]] = []
        score_starts = np.concatenate([[0], np.cumsum(step.score_lens)])
        gated: list[tuple[int, np.ndarray]] = []
        token_starts = np.concatenate([[0], np.cumsum(step.num_tokens)])
        table_starts = np.concatenate([[0], np.cumsum(step.block_table_lens)])
        poisoned = []
        for i in np.flatnonzero(step.ranks == rank).tolist():
            seq_id = int(step.seq_ids[i])
            assert (rank, seq_id) in self.sequences, "a step names a sequence that was not started"
            tokens = step.input_ids[token_starts[i] : token_starts[i + 1]]
            table = step.block_tables[table_starts[i] : table_starts[i + 1]]
            chunk = self._routes[rank, int(step.route_ids[i])] if step.route_ids[i] >= 0 else None
            targets = step.score_target_ids[score_starts[i] : score_starts[i + 1]].tolist()
            routes, contents = self._compute(
                rank,
                int(step.first_positions[i]),
                tokens,
                table,
                chunk,
                int(step.num_suppressed[i]),
            )
            if chunk is None:
                gated.append((seq_id, routes))
            if seq_id in self.poisoned:
                poisoned.append(seq_id)
            elif step.samples[i]:
                sampled.append((seq_id, next_token(contents[-1])))
                score = score_of(contents[-1], next_token(contents[-1]))
                sampled_scores.append(columns_of([score], self._num_top[rank, seq_id]))
            if targets:
                scored = zip(contents, targets, strict=False)
                asked.append((seq_id, [score_of(*pair) for pair in scored]))
        self._emit(rank, step.step_id, gated)
        self._emit_scores(rank, step.step_id, asked)
        num_gate = sum(len(routes) for _, routes in gated)
        total = int(step.num_tokens[step.ranks == rank].sum())
        self.steps[-1].gate_tokens[rank] = num_gate
        self.steps[-1].replayed_tokens[rank] = total - num_gate
        return StepResult(
            rank=rank,
            step_id=step.step_id,
            seq_ids=[seq_id for seq_id, _ in sampled],
            token_ids=[token for _, token in sampled],
            poisoned_seq_ids=poisoned,
            gate_tokens=num_gate,
            expert_load=np.zeros((2, 2), np.int32),
            sent=SentTraffic(0, 0),
            scores=ScoreColumns.joined(sampled_scores),
            timings=StepTimings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        )

    def gate(self, hidden: bytes) -> np.ndarray:
        """[L, K] uint8; another implementation may be less steady."""
        return gate_routes(hidden)

    def _compute(
        self,
        rank: int,
        first: int,
        tokens: np.ndarray,
        table: np.ndarray,
        chunk: RouteChunk | None,
        num_suppressed: int,
    ) -> tuple[np.ndarray, list[bytes]]:
        size = self.block_size
        slots = [int(table[p // size]) * size + p % size for p in range(first + len(tokens))]
        content = self._kv[rank, slots[first - 1]] if first else self.root
        routes, contents = [], []
        for offset, token in enumerate(tokens.tolist()):
            hidden = hidden_of(content, token)
            topk = self.gate(hidden) if chunk is None else chunk.topk_ids[offset]
            routes.append(topk)
            content = slot_content(hidden, np.ascontiguousarray(topk))
            if offset < num_suppressed:
                assert self._kv[rank, slots[first + offset]] == content, "the KV is not there"
            else:
                self._kv[rank, slots[first + offset]] = content
            contents.append(content)
        return np.stack(routes), contents

    def _emit_scores(self, rank: int, step_id: int, asked: list[tuple[int, list[Score]]]) -> None:
        if not asked:
            return
        frame = ScoreFrame(
            rank=rank,
            step_id=step_id,
            seq_ids=np.array([seq_id for seq_id, _ in asked], np.int32),
            num_tokens=np.array([len(scores) for _, scores in asked], np.int32),
            scores=ScoreColumns.joined(
                [columns_of(scores, self._num_top[rank, seq_id]) for seq_id, scores in asked]
            ),
        )
        self._frames.append((self._calls + self.frame_delay + 1, frame))

    def _emit(self, rank: int, step_id: int, gated: list[tuple[int, np.ndarray]]) -> None:
        if not gated:
            return
        ids = np.concatenate([routes for _, routes in gated])
        routes = ExpertRoutes(ids, np.full(ids.shape, 0.5, np.float32))
        frame = RouteFrame(
            rank=rank,
            step_id=step_id,
            seq_ids=np.array([seq_id for seq_id, _ in gated], np.int32),
            num_tokens=np.array([len(r) for _, r in gated], np.int32),
            topk_ids=routes.topk_ids,
            topk_weights=routes.topk_weights,
        )
        self._frames.append((self._calls + self.frame_delay + 1, frame))
