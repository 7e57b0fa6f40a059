"""`python -m tests.returned_routes_table`: for how long telling one client its routes holds up the engine's loop.

In one piece, as a yardstick, and in the parts of one step each that the engine sends. Slicing and encoding, no sockets.
"""

import time
from collections.abc import Iterator

import numpy as np

from cluster.messages import OutputBatch, OutputDelta, RoutePart, SamplingParams, Submit
from cluster.routes import ExpertRoutes, RouteShape
from cluster.types import Namespace, SeqId
from cluster.wire import encode
from router_service.request import Request
from router_service.route_outlet import RouteOutlet

SHAPES = {"demo model": RouteShape(4, 4, 64), "DeepSeek-V3": RouteShape(58, 8, 256)}
NUM_TOKENS = 16_000
CHUNK = 512
BYTES_PER_STEP = 2**20
REPEATS = 5


def main() -> None:
    print("| model | asked | MB | in one piece, ms | parts | longest part, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, shape in SHAPES.items():
        for weights in (False, True):
            whole = min(max(holds(shape, weights, 2**40)) for _ in range(REPEATS))
            parts = [list(holds(shape, weights, BYTES_PER_STEP)) for _ in range(REPEATS)]
            per_choice = shape.id_dtype.itemsize + shape.weight_dtype.itemsize * weights
            size = NUM_TOKENS * shape.num_moe_layers * shape.num_experts_per_tok * per_choice
            longest = min(map(max, parts))
            print(
                f"| {name} | {'ids and weights' if weights else 'ids'} | {size / 1e6:.1f} | "
                f"{whole * 1e3:.1f} | {len(parts[0])} | {longest * 1e3:.2f} |"
            )


def holds(shape: RouteShape, weights: bool, max_bytes: int) -> Iterator[float]:
    """Seconds of each step in which something is told."""
    request = ended_request(shape, weights)
    outlet = RouteOutlet(shape, max_bytes)
    outlet.add(request)
    while not outlet.is_complete(request):
        started = time.perf_counter()
        outlet.begin_step()
        for _, part in outlet.next_parts():
            encode(OutputBatch([delta_of(part)]))
        yield time.perf_counter() - started


def delta_of(part: RoutePart) -> OutputDelta:
    return OutputDelta("r", [], None, routes=part)


def ended_request(shape: RouteShape, weights: bool) -> Request:
    """All its routes are recorded, in chunks as they were computed."""
    submit = Submit(
        "r",
        np.zeros(NUM_TOKENS + 1, np.int32),
        SamplingParams(0, 0.0, 1.0, None, ()),
        None,
        return_routes=True,
        return_route_weights=weights,
    )
    request = Request(
        submit,
        client=b"",
        seq_id=SeqId(0),
        seed=0,
        namespace=Namespace("n"),
        block_size=16,
        route_shape=shape,
        arrival_seconds=0.0,
    )
    rng = np.random.default_rng(0)
    for start in range(0, NUM_TOKENS, CHUNK):
        dims = (min(CHUNK, NUM_TOKENS - start), shape.num_moe_layers, shape.num_experts_per_tok)
        ids = rng.integers(0, shape.num_experts, dims).astype(shape.id_dtype)
        request.route_log.append(ExpertRoutes(ids, rng.random(dims, np.float32)))
    request.finish_reason = "length"
    return request


if __name__ == "__main__":
    main()
