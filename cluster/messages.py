"""Every struct that crosses a process. Frozen, tagged, declared once; `cluster/wire.py` moves them.

Three conversations:
  HTTP server  <-> engine           ToEngine / ToHttpServer
  launcher      -> engine           RankLost, Stop (part of ToEngine)
  engine       <-> expert worker    ToWorker / ToEngineFromWorker; route frames come on a second socket
"""

from typing import Annotated

import msgspec
import numpy as np

from cluster.dispatch_plan import ReceivePart, SendPart
from cluster.model_spec import ComputeDtype
from cluster.scores import ScoreColumns
from cluster.types import DispatchMode, EvictTarget, FinishReason

Int32Column = np.ndarray
"""[n] int32. (msgspec needs the plain class; the dtype is checked where a column is used.)"""


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens of a request are drawn. max_tokens 0: none, the prompt is only scored. temperature 0 is greedy. The
    engine fills `seed` at submit if it is None.
    """

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop_token_ids: tuple[int, ...]
    """Ids that end the generation with finish_reason "stop": the end-of-sequence ids unless `ignore_eos`, and the
    request's own."""
    top_k: int | None = None
    """At least 1; None: of all ids."""
    min_p: float = 0.0
    min_tokens: int = 0
    """At most max_tokens. So many output tokens are none of `barred_token_ids`."""
    barred_token_ids: tuple[int, ...] = ()
    """Distinct, in range, and not the whole vocabulary."""


# HTTP server -> engine


class Submit(msgspec.Struct, frozen=True):
    """A validated request. Prompt ids are in range, the prompt fits the context with `max_tokens`."""

    request_id: str
    prompt_token_ids: Int32Column
    sampling: SamplingParams
    cache_salt: str | None
    return_routes: bool
    recompute_prompt: bool = False
    """The forward pass goes over every prompt token, also over those whose KV is there: it reads that and leaves it."""
    score_prompt: bool = False
    """Every prompt token but the first gets a score; what the store has of them is not computed again."""
    num_prompt_alternatives: int = 1
    """Most likely tokens that are listed with the score of a prompt token, at least 1. The store has one."""
    num_top_logprobs: int = 1
    """Most likely tokens that are listed with the score of an output token, at least 1."""
    return_scores: bool = False
    choice: int = 0
    """Number among the choices of one prompt: part of the key that draws its tokens."""
    leader_id: str | None = None
    """request_id of choice 0, submitted before: this one takes its seed and, once known, the routes of its prompt."""
    priority: int = 0
    """Lower goes first, in the queue and when blocks run out; first come, first served among equals."""


class SubmitAll(msgspec.Struct, frozen=True, tag=True):
    """What one client asks for at once, its choices and prompts: all are taken or all refused."""

    submits: Annotated[list[Submit], msgspec.Meta(min_length=1)]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client left. Idempotent; unknown ids are ignored because the request may just have finished."""

    request_id: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A stop string was completed by output token number `num_output_tokens` (1-based)."""

    request_id: str
    num_output_tokens: int


class MetricsQuery(msgspec.Struct, frozen=True, tag=True):
    query_id: int


class StatusQuery(msgspec.Struct, frozen=True, tag=True):
    query_id: int


class EvictCommand(msgspec.Struct, frozen=True, tag=True):
    query_id: int
    part: EvictTarget


class FeaturesCommand(msgspec.Struct, frozen=True, tag=True):
    """Switches between steps; None leaves a feature as it is, so that all None only asks."""

    query_id: int
    route_replay: bool | None
    planned_dispatch: bool | None
    prefix_store: bool | None


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """From the launcher: Ray reported the actor of this rank dead."""

    rank: int
    reason: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """From the launcher: end every request with an error and leave the loop."""

    reason: str


ToEngine = (
    SubmitAll
    | Abort
    | Finish
    | MetricsQuery
    | StatusQuery
    | EvictCommand
    | FeaturesCommand
    | RankLost
    | Stop
)


# engine -> HTTP server


class Completion(msgspec.Struct, frozen=True):
    """Comes with the last delta of a request."""

    finish_reason: FinishReason
    error: str | None
    """Set if and only if finish_reason is "error"."""
    num_output_tokens: int
    cached_tokens: int
    replayed_tokens: int
    topk_ids: np.ndarray | None
    """[prompt + output - 1, MoE layers, experts per token] uint8 or uint16 if `return_routes`, from position 0."""
    topk_weights: np.ndarray | None


class OutputDelta(msgspec.Struct, frozen=True):
    """New tokens of one request; `completion` closes it."""

    request_id: str
    token_ids: list[int]
    completion: Completion | None
    scores: ScoreColumns | None = None
    """Of `token_ids`, if `return_scores`."""
    prompt_scores: ScoreColumns | None = None
    """[prompt - 1] of the prompt tokens from the second on, if `score_prompt`: in one delta, when all are known."""


class OutputBatch(msgspec.Struct, frozen=True, tag=True):
    """All deltas of one step for one HTTP server."""

    deltas: list[OutputDelta]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Submits that the engine did not take: queue bound reached, one can never fit, or the cell cannot run steps."""

    request_id: str
    """Of the first of them."""
    kind: str
    """"overloaded", "invalid" or "unavailable"."""
    reason: str
    field: str | None
    """Of the API, where one is to blame."""


class MetricsText(msgspec.Struct, frozen=True, tag=True):
    query_id: int
    text: bytes


class FeatureStates(msgspec.Struct, frozen=True):
    """True: on."""

    route_replay: bool
    planned_dispatch: bool
    prefix_store: bool


class CellStatus(msgspec.Struct, frozen=True, tag=True):
    """Answer to StatusQuery; /health and /admin/status are views of it."""

    query_id: int
    ready: bool
    reason: str
    """Empty when ready."""
    ep_size: int
    placement_epoch: int
    dispatch: DispatchMode
    num_waiting: int
    num_running: int
    kv_blocks_free: list[int]
    kv_blocks_used: list[int]
    """Per rank: blocks that a running request or the store holds."""
    kv_blocks_leased: int
    store_nodes: int
    store_bytes: dict[str, int]
    steps_total: int
    features: FeatureStates


class EvictReport(msgspec.Struct, frozen=True, tag=True):
    query_id: int
    part: EvictTarget
    nodes: int
    bytes: int
    kept_leased: int


class FeaturesReport(msgspec.Struct, frozen=True, tag=True):
    """All features as they are after the command."""

    query_id: int
    features: FeatureStates


ToHttpServer = OutputBatch | Refused | MetricsText | CellStatus | EvictReport | FeaturesReport


# engine -> expert worker


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


class WorkerStop(msgspec.Struct, frozen=True, tag=True):
    pass


ToWorker = SequenceStart | SequenceEnd | RouteChunk | PlanPart | StepDescriptor | WorkerStop


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


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on. `exchange`: the exchange broke, so another rank may be the cause."""

    rank: int
    step_id: int
    exchange: bool
    reason: str


ToEngineFromWorker = WorkerReady | PlansHeld | StepResult | WorkerFailed


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
