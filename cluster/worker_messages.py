"""Every struct that crosses between engine and expert workers. Frozen, tagged, declared once.

`cluster/wire.py` moves them: ToWorker and ToEngineFromWorker on one socket, LateFrame on a second one.
"""

import msgspec
import numpy as np

from cluster.dispatch_plan import ReceivePart, SendPart
from cluster.logit_rules import NO_RULES, LogitRules
from cluster.messages import Int32Column
from cluster.model_spec import ComputeDtype
from cluster.rank_place import RankPlace
from cluster.scores import ScoreColumns
from cluster.types import DispatchMode

# engine -> expert worker


class KnownTokens(msgspec.Struct, frozen=True):
    """Tokens of a sequence from `first_position` on, as far as there are any when it starts on a rank."""

    num_prompt_tokens: int
    first_position: int
    """0, or the prompt's length where only generated tokens matter."""
    token_ids: Int32Column


class SequenceStart(msgspec.Struct, frozen=True, tag=True):
    """Once per request and home rank, before the first step that names the seq_id."""

    seq_id: int
    temperature: float
    top_p: float
    seed: int
    top_k: int | None = None
    min_p: float = 0.0
    barred_token_ids: tuple[int, ...] = ()
    """Not sampled for a position before `barred_before`."""
    barred_before: int = 0
    num_top_logprobs: int = 1
    """Most likely tokens that are listed with every score, at least 1."""
    choice: int = 0
    rules: LogitRules = NO_RULES
    known: KnownTokens | None = None
    """For rules that look back. Later tokens come as inputs of steps."""
    namespace: str = ""
    """Of the request. What a rank keeps of one is no quicker for another."""


class SequenceEnd(msgspec.Struct, frozen=True, tag=True):
    """These seq_ids will not be named again."""

    seq_ids: list[int]


class RouteChunk(msgspec.Struct, frozen=True, tag=True):
    """Routes that a chunk of step `step_id` replays; named by `route_id` in the descriptor. [T, L, K] both."""

    route_id: int
    step_id: int
    topk_ids: np.ndarray
    topk_weights: np.ndarray


class StepDescriptor(msgspec.Struct, frozen=True, tag=True):
    """One step, the same bytes for every rank. S chunks, ordered by rank; N = sum of num_tokens.

    A rank without chunks takes part with zero tokens. Columns are int32.
    """

    step_id: int
    placement_epoch: int
    dispatch: DispatchMode
    seq_ids: Int32Column
    """[S]"""
    ranks: Int32Column
    """[S] home rank of each chunk"""
    first_positions: Int32Column
    """[S] position of the chunk's first token in its sequence"""
    num_tokens: Int32Column
    """[S] tokens of the chunk, at least 1"""
    route_ids: Int32Column
    """[S] RouteChunk to replay, −1: the gate chooses"""
    samples: Int32Column
    """[S] 1 if the chunk's last token is the sequence's last known one, so that the next is sampled"""
    num_suppressed: Int32Column
    """[S] first tokens of the chunk whose KV is in the blocks already: they read it and write none"""
    input_ids: Int32Column
    """[N] token ids, chunk after chunk"""
    block_table_lens: Int32Column
    """[S]"""
    block_tables: Int32Column
    """[sum of block_table_lens] the sequence's blocks from position 0"""
    fragment_lens: Int32Column
    """[S] plan fragments that the chunk travels by, 0: its dispatch is negotiated"""
    fragment_ids: Int32Column
    """[sum of fragment_lens] acknowledged by every rank; together they cover the chunk's tokens in order"""
    evicted_fragment_ids: Int32Column
    """[any] not named from this step on"""
    score_lens: Int32Column
    """[S] first tokens of the chunk for which the score of the token after is asked"""
    score_target_ids: Int32Column
    """[sum of score_lens] the tokens after them"""


class PlanPart(msgspec.Struct, frozen=True, tag=True):
    """One rank's part of a plan fragment, ahead of the first step that names it."""

    fragment_id: int
    digest: bytes
    """`PlanFragment.digest`, the same in all parts: ranks with different ones must not meet in an exchange."""
    source: int
    placement_epoch: int
    num_tokens: int
    send: SendPart | None
    """For the source rank only."""
    receive: ReceivePart


class MeasureWeights(msgspec.Struct, frozen=True, tag=True):
    """How much memory would this rank's share of the checkpoint take beside what serves. Answered by WeightsMeasured
    before any rank is told to read."""

    update_id: int
    model_dir: str


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    """Read this rank's share of the checkpoint beside the weights that serve; answered by WeightsPrepared."""

    update_id: int
    model_dir: str


class CommitWeights(msgspec.Struct, frozen=True, tag=True):
    """Every rank has prepared: serve what was read. Answered by WeightsCommitted."""

    update_id: int


class DiscardWeights(msgspec.Struct, frozen=True, tag=True):
    """Some rank could not: forget what was read."""


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Leave the group, which lost a rank or its engine, for the one that meets at this store; KV and weights stay.
    Answered by WorkerReady, or by GroupBroken when the group does not come together."""

    generation: int
    """Of the cell's groups, counted from 0."""
    store_address: str
    store_port: int
    timeout_seconds: float
    engine_life: int = 0
    """Which of the cell's engines asks, counted from 0. What the rank was told by one before, it forgets."""
    model_fingerprint: str = ""
    """Of the weights that the cell serves: a rank with others ends, so that another takes its place. Empty: any."""


class WorkerStop(msgspec.Struct, frozen=True, tag=True):
    pass


ToExchangeWeights = MeasureWeights | PrepareWeights | CommitWeights | DiscardWeights
ToWorker = (
    SequenceStart
    | SequenceEnd
    | RouteChunk
    | PlanPart
    | StepDescriptor
    | ToExchangeWeights
    | JoinGroup
    | WorkerStop
)


# expert worker -> engine


class CellIdentity(msgspec.Struct, frozen=True):
    """What the engine and every rank of a cell must have in common before a step can mean the same to all."""

    model_fingerprint: str
    """`cluster.namespace.model_fingerprint` of the files that this process sees."""
    dtype: ComputeDtype
    deterministic: bool
    ep_size: int
    placement_epoch: int
    dispatch: DispatchMode
    block_size: int
    num_kv_blocks: int
    """Per rank."""


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """Loaded and joined. The engine refuses a rank whose `identity` is not its own."""

    rank: int
    pid: int
    identity: CellIdentity
    incarnation: str
    """Drawn at start: what an earlier process of this rank acknowledged does not count."""
    place: RankPlace
    generation: int = 0
    """Of the group that it has joined."""


class HeldPlan(msgspec.Struct, frozen=True):
    fragment_id: int
    digest: bytes
    """Of the part that came under this id."""


class PlansHeld(msgspec.Struct, frozen=True, tag=True):
    """This process of the rank holds these fragments."""

    rank: int
    incarnation: str
    held: list[HeldPlan]


class StepTimings(msgspec.Struct, frozen=True):
    """Seconds of one rank in one step; `forward` contains the others and the sampler."""

    forward: float
    attention: float
    gate: float
    dispatch: float
    experts: float
    combine: float


class SentTraffic(msgspec.Struct, frozen=True):
    """What one rank sent to the others. Payload bytes, without the transport's own."""

    messages: int
    bytes: int


class SequenceFailure(msgspec.Struct, frozen=True):
    """A sequence that cannot go on, through nobody's fault but its own."""

    seq_id: int
    reason: str


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer. `seq_ids` and `token_ids` are the sampled tokens, in the descriptor's order."""

    rank: int
    step_id: int
    seq_ids: list[int]
    token_ids: list[int]
    poisoned_seq_ids: list[int]
    """Sequences with a non-finite router logit or logit: they end with an error and nothing of them is published."""
    gate_tokens: int
    """Tokens of this rank that went through a gate (counted once per token, not per layer)."""
    expert_load: Int32Column
    """[MoE layers, local experts] rows that this rank's experts served; int32"""
    sent: SentTraffic
    """By the exchanges of this step, planned or not."""
    scores: ScoreColumns
    """Of `token_ids`."""
    timings: StepTimings
    failures: list[SequenceFailure] = []
    """Sequences without a token that end with an error; what they have computed is right."""
    compiling_seq_ids: list[int] = []
    """Sequences of this rank whose next token would wait for their grammar, and every rank with it."""


class LoadFailure(msgspec.Struct, frozen=True):
    """Why a rank goes on with the weights that it has."""

    reason: str
    of_checkpoint: bool
    """The directory is to blame; else memory or the machine."""


class WeightsMeasured(msgspec.Struct, frozen=True, tag=True):
    """What the rank's share of other weights takes, or why it will not read them."""

    rank: int
    update_id: int
    host: str
    """Ranks with the same one share `free_bytes`."""
    needed_bytes: int
    free_bytes: int
    """Of the host's memory, seen by this rank."""
    failure: LoadFailure | None


class WeightsPrepared(msgspec.Struct, frozen=True, tag=True):
    """The rank has read other weights, or could not; it serves the old ones."""

    rank: int
    update_id: int
    model_fingerprint: str
    """Of the files as this rank found them after it had read them; empty with a failure."""
    failure: LoadFailure | None


class WeightsCommitted(msgspec.Struct, frozen=True, tag=True):
    rank: int
    update_id: int


class GroupBroken(msgspec.Struct, frozen=True, tag=True):
    """An exchange broke, or a group did not come together: mostly another rank is the cause. This one has left the
    group and holds what it held; it joins another when told to."""

    rank: int
    generation: int
    """Of the group."""
    reason: str


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on, and ends."""

    rank: int
    step_id: int
    reason: str


ToEngineFromWorker = (
    WorkerReady
    | PlansHeld
    | StepResult
    | WeightsMeasured
    | WeightsPrepared
    | WeightsCommitted
    | GroupBroken
    | WorkerFailed
)


class ScoreFrame(msgspec.Struct, frozen=True, tag=True):
    """Scores that chunks of one step asked for, chunk after chunk in the descriptor's order. Second socket."""

    rank: int
    step_id: int
    seq_ids: Int32Column
    """[C]"""
    num_tokens: Int32Column
    """[C]"""
    scores: ScoreColumns


class RouteFrame(msgspec.Struct, frozen=True, tag=True):
    """Routes that one rank's gate chose in one step, chunk after chunk in the descriptor's order. Second socket."""

    rank: int
    step_id: int
    seq_ids: Int32Column
    """[C]"""
    num_tokens: Int32Column
    """[C]"""
    topk_ids: np.ndarray
    """[sum of num_tokens, L, K] uint8 or uint16, sorted by id"""
    topk_weights: np.ndarray
    """same shape"""


LateFrame = RouteFrame | ScoreFrame
"""What follows a step's result on the second socket: for a large model it is megabytes."""
