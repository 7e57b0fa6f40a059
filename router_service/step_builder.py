"""A schedule as the one message that every rank gets. Pure: requests are read, nothing is changed."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.types import DispatchMode, StepId
from cluster.worker_messages import RouteChunk, StepDescriptor
from router_service.scheduler import ScheduledChunk

Int32Array = npt.NDArray[np.int32]


def _column(values: list[int]) -> Int32Array:
    return np.array(values, np.int32)


def _join(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def build_step(
    step_id: StepId,
    chunks: Sequence[ScheduledChunk],
    route_ids: Sequence[int],
    *,
    placement_epoch: int,
    dispatch: DispatchMode,
    evicted_fragment_ids: Sequence[int] = (),
) -> StepDescriptor:
    """Columns in the order of `chunks`, which are sorted by home rank. route_ids: −1 where the gate chooses."""
    ends = [chunk.first_position + chunk.num_tokens for chunk in chunks]
    return StepDescriptor(
        step_id=step_id,
        placement_epoch=placement_epoch,
        dispatch=dispatch,
        seq_ids=_column([chunk.request.seq_id for chunk in chunks]),
        ranks=_column([chunk.request.home_rank or 0 for chunk in chunks]),
        first_positions=_column([chunk.first_position for chunk in chunks]),
        num_tokens=_column([chunk.num_tokens for chunk in chunks]),
        route_ids=_column(list(route_ids)),
        samples=_column([int(chunk.samples) for chunk in chunks]),
        num_suppressed=_column([chunk.num_suppressed for chunk in chunks]),
        input_ids=_join(
            [
                c.request.token_ids[c.first_position : end]
                for c, end in zip(chunks, ends, strict=True)
            ]
        ),
        block_table_lens=_column([chunk.request.num_blocks for chunk in chunks]),
        block_tables=_join([chunk.request.block_table for chunk in chunks]),
        fragment_lens=_column([len(chunk.fragment_ids) for chunk in chunks]),
        fragment_ids=_column([f for chunk in chunks for f in chunk.fragment_ids]),
        evicted_fragment_ids=_column(list(evicted_fragment_ids)),
        score_lens=_column([chunk.num_scored for chunk in chunks]),
        score_target_ids=_join([_targets(chunk) for chunk in chunks]),
    )


def _targets(chunk: ScheduledChunk) -> Int32Array:
    """The tokens after those whose score is asked."""
    first = chunk.first_position + 1
    return chunk.request.token_ids[first : first + chunk.num_scored]


def build_route_chunk(route_id: int, step_id: StepId, chunk: ScheduledChunk) -> RouteChunk:
    """What a replaying chunk needs: the recorded routes of its tokens."""
    end = chunk.first_position + chunk.num_tokens
    routes = chunk.request.route_log.slice(chunk.first_position, end)
    return RouteChunk(route_id, step_id, routes.topk_ids, routes.topk_weights)
