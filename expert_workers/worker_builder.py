"""From options to a worker that has its weights and its place in the group: the composition of one rank, in two steps,
so that a group which does not come together costs no weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from cluster.errors import ConfigError, GrammarError
from cluster.grammar import GrammarCompiler, load_grammar_compiler
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ComputeDtype, ModelSpec
from cluster.namespace import model_fingerprint
from cluster.placement import ExpertPlacement
from cluster.types import DispatchMode, ExchangeKind
from cluster.worker_messages import CellIdentity
from expert_workers.device import torch_dtype
from expert_workers.dispatch.base import Dispatcher
from expert_workers.dispatch.load import LoadCountingDispatcher
from expert_workers.dispatch.local import LocalDispatcher
from expert_workers.dispatch.negotiated import NegotiatedDispatcher
from expert_workers.ep_group import MEET_SECONDS, EpGroup, GroupOptions, connect_store, join_group
from expert_workers.exchange.base import Exchange
from expert_workers.known_sequences import KnownSequences
from expert_workers.kv_pool import KVPool
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.model.transformer import Transformer
from expert_workers.model.weights import LoadProgress, WeightTarget, load_weights
from expert_workers.plan_cache import PlanCache, PlanShape
from expert_workers.rank_model import RankModel
from expert_workers.weight_exchange import WeightExchange
from expert_workers.worker import ExpertWorker


@dataclass(frozen=True)
class WorkerOptions:
    """All that one rank is started with. Every rank gets the same values but for rank, device and host address.

    store_address, store_port: where the EP group meets; unused while loading, and with local dispatch
    join_timeout_seconds:      until every rank has loaded and arrived
    exchange_timeout_seconds:  of one exchange; longer than the slowest step of a healthy peer
    weights_dir:               of the weights that are served by now; None: those in model_dir. What is read as text
                               (config, tokenizer, end-of-sequence ids) stays that of model_dir
    placement:                 None: contiguous
    group_name:                of the cell alone
    meet_timeout_seconds:      see GroupOptions
    """

    model_dir: Path
    rank: int
    ep_size: int
    dtype: ComputeDtype
    device: torch.device
    num_kv_blocks: int
    block_size: int
    deterministic: bool
    dispatch: DispatchMode
    exchange: ExchangeKind
    host_address: str
    store_address: str
    store_port: int
    join_timeout_seconds: float
    exchange_timeout_seconds: float
    weights_dir: Path | None = None
    placement: ExpertPlacement | None = None
    group_name: str = "ep_group"
    meet_timeout_seconds: float = MEET_SECONDS

    @property
    def served_dir(self) -> Path:
        """Whose weights this rank serves and is known by."""
        return self.weights_dir or self.model_dir

    @property
    def group_options(self) -> GroupOptions:
        return GroupOptions(
            rank=self.rank,
            ep_size=self.ep_size,
            exchange=self.exchange,
            host_address=self.host_address,
            store_address=self.store_address,
            store_port=self.store_port,
            join_timeout_seconds=self.join_timeout_seconds,
            exchange_timeout_seconds=self.exchange_timeout_seconds,
            group_name=self.group_name,
            meet_timeout_seconds=self.meet_timeout_seconds,
        )


def build_expert_worker(
    options: WorkerOptions, *, store: Store | None = None, progress: LoadProgress | None = None
) -> ExpertWorker:
    """Loads this rank's weights, then joins the group. Blocks until all ranks have joined.

    store: where the ranks meet, if the caller has it open; otherwise the one at the options' address, which some
    process of the cell hosts (`ep_group.host_store`).
    Raises ConfigError (CheckpointError for the model), CellError when the group does not come together.
    """
    return place_in_group(options, load_rank(options, progress), store)


@dataclass(frozen=True)
class LoadedParts:
    """All of a rank that does not depend on where its group meets."""

    spec: ModelSpec
    placement: ExpertPlacement
    identity: CellIdentity
    model: RankModel
    numerics: Numerics
    kv_pool: KVPool
    grammars: GrammarCompiler | GrammarError


def load_rank(options: WorkerOptions, progress: LoadProgress | None = None) -> LoadedParts:
    """Reads this rank's weights. Raises ConfigError (CheckpointError for the model)."""
    spec = read_model_spec(options.model_dir)
    placement = expert_placement(options, spec)
    dtype = torch_dtype(options.dtype)
    target = WeightTarget(placement, options.rank, dtype, options.device)
    weights = load_weights(options.served_dir, spec, target, progress)
    numerics = DeterministicNumerics() if options.deterministic else FastNumerics()
    transformer = Transformer(spec, weights, numerics)
    kv_pool = KVPool(
        num_layers=spec.num_layers,
        num_blocks=options.num_kv_blocks,
        block_size=options.block_size,
        width=spec.attention.kv_width,
        dtype=dtype,
        device=options.device,
    )
    return LoadedParts(
        spec=spec,
        placement=placement,
        identity=rank_identity(options, placement),
        model=RankModel(spec, transformer, WeightExchange(weights, spec, target, options.dtype)),
        numerics=numerics,
        kv_pool=kv_pool,
        grammars=grammar_compiler(options, spec),
    )


def place_in_group(
    options: WorkerOptions, parts: LoadedParts, store: Store | None = None
) -> ExpertWorker:
    """Blocks until all ranks have joined. store: see `build_expert_worker`. Raises CellError when they do not."""
    group = None if options.dispatch == "local" else _join(options, store)
    exchange = None if group is None else group.exchange
    placement = parts.placement
    return ExpertWorker(
        rank=options.rank,
        identity=parts.identity,
        model=parts.model,
        kv_pool=parts.kv_pool,
        dispatcher=LoadCountingDispatcher(
            _dispatcher(placement, exchange, options.device), placement.num_physical_per_rank
        ),
        plans=PlanCache(
            plan_shape(options, spec=parts.spec, placement=placement, numerics=parts.numerics),
            exchange,
        ),
        group=group,
        sequences=KnownSequences(parts.grammars),
    )


def grammar_compiler(options: WorkerOptions, spec: ModelSpec) -> GrammarCompiler | GrammarError:
    """Or why the model has none: a rank needs a tokenizer for structured output alone."""
    try:
        return load_grammar_compiler(
            options.model_dir, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids
        )
    except GrammarError as error:
        return error


def expert_placement(options: WorkerOptions, spec: ModelSpec) -> ExpertPlacement:
    """Raises ConfigError for one of another size than the model and the group, or where the default does not go."""
    num_experts, placement = spec.gate.num_experts, options.placement
    if placement is None:
        return ExpertPlacement.contiguous(num_experts, options.ep_size)
    if (placement.num_experts, placement.ep_size) != (num_experts, options.ep_size):
        raise ConfigError(
            f"placement epoch {placement.epoch} is for {placement.num_experts} experts on "
            f"{placement.ep_size} ranks, the cell has {num_experts} on {options.ep_size}"
        )
    return placement


def plan_shape(
    options: WorkerOptions, *, spec: ModelSpec, placement: ExpertPlacement, numerics: Numerics
) -> PlanShape:
    """What this rank's plan parts must look like."""
    return PlanShape(
        rank=options.rank,
        ep_size=placement.ep_size,
        placement_epoch=placement.epoch,
        num_layers=spec.num_moe_layers,
        num_experts=placement.num_physical_per_rank,
        num_experts_per_tok=spec.gate.num_experts_per_tok,
        min_group_rows=numerics.min_group_rows,
        device=options.device,
    )


def rank_identity(options: WorkerOptions, placement: ExpertPlacement) -> CellIdentity:
    """What this rank has, from its own files; `model_fingerprint` says how much of them it reads."""
    return CellIdentity(
        model_fingerprint=model_fingerprint(options.served_dir, options.dtype),
        dtype=options.dtype,
        deterministic=options.deterministic,
        ep_size=placement.ep_size,
        placement_epoch=placement.epoch,
        dispatch=options.dispatch,
        block_size=options.block_size,
        num_kv_blocks=options.num_kv_blocks,
    )


def _join(options: WorkerOptions, store: Store | None) -> EpGroup:
    group_options = options.group_options
    return join_group(group_options, store or connect_store(group_options))


def _dispatcher(
    placement: ExpertPlacement, exchange: Exchange | None, device: torch.device
) -> Dispatcher:
    if exchange is None:
        return LocalDispatcher(placement, device)
    return NegotiatedDispatcher(placement, exchange, device)
