"""From a cell's plan to what its engine is given: store and its state, plan compiler, shapes of the model."""

from importlib.metadata import version

from cluster.namespace import namespace_of
from cluster.placement import ExpertPlacement
from deploy.cell_plan import CellPlan
from prefix_store.compiler_thread import CompilerThread
from prefix_store.journal.directory import StateDirectory
from prefix_store.journal.journal import Journal
from prefix_store.journal.records import BlockSizes, Header
from prefix_store.journal.store_journal import StoreJournal
from prefix_store.journal.writer import WriterLimits
from prefix_store.store import PrefixStore
from router_service.engine_composition import ServedShapes


def open_store(plan: CellPlan, model_fingerprint: str) -> PrefixStore:
    """With what its state directory has, if there is one. Raises ConfigError."""
    if plan.state is None:
        return make_store(plan)
    shape = plan.spec.route_shape
    store = make_store(
        plan,
        Journal(
            StateDirectory(plan.state.directory),
            Header.of(model_fingerprint, _numerics(plan), plan.block_size, shape),
            BlockSizes.of(plan.block_size, shape),
            WriterLimits(plan.state.max_bytes, plan.state.fsync_seconds),
        ),
    )
    store.load()
    return store


def _numerics(plan: CellPlan) -> str:
    """A deterministic cell replays what it would have computed itself, byte for byte: so it takes routes from its like
    alone. Others take any routes of their weights."""
    if not plan.deterministic:
        return "fast"
    return f"deterministic, {plan.ep_size} ranks, torch {version('torch')}"


def make_store(plan: CellPlan, journal: StoreJournal | None = None) -> PrefixStore:
    return PrefixStore(
        num_ranks=plan.ep_size,
        num_kv_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        route_shape=plan.spec.route_shape,
        route_budget_bytes=plan.route_budget_bytes,
        score_budget_bytes=plan.score_budget_bytes,
        kv_bytes_per_block=plan.kv_bytes_per_block,
        journal=journal,
    )


def start_compiler(plan: CellPlan) -> CompilerThread:
    """Its thread runs until it is closed."""
    return CompilerThread(ExpertPlacement.contiguous(plan.spec.gate.num_experts, plan.ep_size))


def served_shapes(plan: CellPlan) -> ServedShapes:
    return ServedShapes(
        vocab_size=plan.spec.vocab_size,
        route_shape=plan.spec.route_shape,
        namespace_of=lambda fingerprint, tenant, cache_salt: namespace_of(
            fingerprint, block_size=plan.block_size, tenant=tenant, cache_salt=cache_salt
        ),
    )
