"""From a cell's plan to what its engine is given: store, plan compiler, shapes of the model."""

from cluster.namespace import namespace_of
from cluster.placement import ExpertPlacement
from deploy.cell_plan import CellPlan
from prefix_store.compiler_thread import CompilerThread
from prefix_store.store import PrefixStore
from router_service.engine_composition import ServedShapes


def make_store(plan: CellPlan) -> PrefixStore:
    return PrefixStore(
        num_ranks=plan.ep_size,
        num_kv_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        route_shape=plan.spec.route_shape,
        route_budget_bytes=plan.route_budget_bytes,
        score_budget_bytes=plan.score_budget_bytes,
        kv_bytes_per_block=plan.kv_bytes_per_block,
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
