"""Every struct that crosses a process between HTTP servers, launcher and engine. Frozen, tagged, declared once.

`cluster/wire.py` moves them. What engine and expert workers say to each other is in `cluster/worker_messages.py`.
  HTTP server  <-> engine           ToEngine / ToHttpServer
  launcher      -> engine           RankLost, Watching, Regroup, Stop (part of ToEngine)
  engine        -> launcher         CellStatus, GroupWanted, WeightsServed
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

from cluster.logit_rules import NO_RULES, LogitRules
from cluster.prefix_match import StateOnDisk
from cluster.rank_place import RankPlace
from cluster.scores import ScoreColumns
from cluster.types import DispatchMode, EvictTarget, FinishReason, Running

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
    rules: LogitRules = NO_RULES


# HTTP server -> engine


class PromptSources(msgspec.Struct, frozen=True):
    """Where the tokens of a prompt came from when its request began; the others were computed."""

    cached_tokens: int
    replayed_tokens: int


class Submit(msgspec.Struct, frozen=True):
    """A validated request. Prompt ids are in range, the prompt fits the context with `max_tokens`."""

    request_id: str
    prompt_token_ids: Int32Column
    sampling: SamplingParams
    cache_salt: str | None
    return_routes: bool
    """Of the positions from `routes_start` to before `routes_end` that were an input (None: to the last one)."""
    routes_start: int = 0
    routes_end: int | None = None
    return_route_weights: bool = True
    """With the ids; five times as many bytes."""
    tenant: str | None = None
    """Whose API key it came with; prefixes are shared within a tenant, and there within a salt."""
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
    is_streamed: bool = False
    """The client is shown tokens as they come; the same in all that is submitted at once."""
    is_again: bool = False
    """Taken before, and ended by an update of the weights (`Completion.again`) or by the end of the engine that had
    it: the queue's bound is not for it."""
    output_token_ids: Int32Column | None = None
    """Of an answer of which an engine that is lost had told something: its first output tokens, at most `max_tokens`,
    perhaps none or all. It goes on behind them, and everything that counts output tokens counts these too. None:
    nothing of the answer was told."""
    prompt_sources: PromptSources | None = None
    """Told by the engine that is lost. None: they are counted now."""


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


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Serve those of another directory from the next step on. Answered by WeightsUpdated or WeightsRefused."""

    query_id: int
    model_dir: str
    """Absolute, the same on the hosts of all ranks."""
    running: Running
    """What becomes of what has begun; "restart": of that of which nothing was shown, the rest is aborted."""


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """From the launcher: Ray reported the actor of this rank dead."""

    rank: int
    reason: str


class Watching(msgspec.Struct, frozen=True, tag=True):
    """From the launcher, which is told from now on when the ranks need another group."""


class Regroup(msgspec.Struct, frozen=True, tag=True):
    """From the launcher: the ranks meet at this store and are a cell again."""

    generation: int
    """Of the cell's groups, counted from 0."""
    store_address: str
    store_port: int
    joining_ranks: dict[int, int]
    """Whose processes the engine tells to join, each with the group that it was started for (`RankName`); the others
    have been told."""


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
    | UpdateWeights
    | RankLost
    | Watching
    | Regroup
    | Stop
)


# engine -> HTTP server


class Completion(msgspec.Struct, frozen=True):
    """Comes with the last delta of a request."""

    finish_reason: FinishReason
    error: str | None
    """Set if and only if finish_reason is "error" or "abort"."""
    num_output_tokens: int
    cached_tokens: int
    replayed_tokens: int
    again: bool = False
    """With "abort": nothing of the answer was shown, all of it shall be submitted again."""
    is_at_fault: bool = False
    """With "error": the request itself is the reason, and ends so again if it is submitted again."""


class RoutePart(msgspec.Struct, frozen=True):
    """Routes of the positions from `start` on."""

    start: int
    topk_ids: np.ndarray
    """[T, MoE layers, experts per token] uint8 or uint16"""
    topk_weights: np.ndarray | None
    """The same shape, float32; None unless `return_route_weights`."""


class OutputDelta(msgspec.Struct, frozen=True):
    """New tokens of one request; `completion` closes it."""

    request_id: str
    token_ids: list[int]
    completion: Completion | None
    scores: ScoreColumns | None = None
    """Of `token_ids`, if `return_scores`."""
    prompt_scores: ScoreColumns | None = None
    """[prompt - 1] of the prompt tokens from the second on, if `score_prompt`: in one delta, when all are known."""
    weight_version: str = ""
    """Of the weights that computed what this says (`cluster.namespace.weight_version`)."""
    routes: RoutePart | None = None
    """If `return_routes`: those after the part before, at least one part and all that are asked before `completion`.
    After a stop string there may be some of tokens behind it."""
    prompt_sources: PromptSources | None = None
    """With the first output token."""


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


class LastRecovery(msgspec.Struct, frozen=True):
    """What came of the last outage in which no step could run."""

    generation: int
    """Of the group of ranks that it ended with."""
    reason: str
    seconds: float
    """To the next step that could run."""
    new_ranks: list[int]
    """Whose process came in place of one that was lost."""
    kept_ranks: list[int]


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
    weight_version: str
    """Of the weights that are served."""
    places: list[RankPlace]
    """By rank, as far as they have reported."""
    state: StateOnDisk | None = None
    """None: nothing is kept on disk."""
    last_recovery: LastRecovery | None = None
    """None: this engine has seen none."""


class EvictReport(msgspec.Struct, frozen=True, tag=True):
    query_id: int
    part: EvictTarget
    nodes: int
    bytes: int
    kept_leased: int
    failure: str = ""
    """Why some of it may still be on disk."""


class FeaturesReport(msgspec.Struct, frozen=True, tag=True):
    """All features as they are after the command."""

    query_id: int
    features: FeatureStates


class WeightsUpdated(msgspec.Struct, frozen=True, tag=True):
    """All ranks serve the other weights."""

    query_id: int
    weight_version: str
    fingerprint: str
    seconds: float
    """From the end of the step before."""
    aborted: int
    """Requests that had begun and ended with an error."""
    restarted: int
    """Requests that had begun and begin again."""
    evicted_nodes: int
    evicted_bytes: int
    """Of the prefix store: KV, routes and scores."""


class WeightsRefused(msgspec.Struct, frozen=True, tag=True):
    """The weights that were served are served."""

    query_id: int
    kind: Literal["invalid", "conflict", "unavailable"]
    """The directory is to blame, another update is under way, or the cell or a rank could not."""
    reason: str


class GroupWanted(msgspec.Struct, frozen=True, tag=True):
    """To the launcher: no step can run in this group any more."""

    generation: int
    """Of that group: one that has been replaced since needs nothing."""
    silent_ranks: list[int]
    """That did not answer in time: some of them may hang."""
    reason: str


class WeightsServed(msgspec.Struct, frozen=True, tag=True):
    """To the launcher: what a new process has to load, and a new engine to expect, from now on."""

    model_dir: str
    fingerprint: str


ToHttpServer = (
    OutputBatch
    | Refused
    | MetricsText
    | CellStatus
    | EvictReport
    | FeaturesReport
    | WeightsUpdated
    | WeightsRefused
)

ToLauncher = CellStatus | GroupWanted | WeightsServed
