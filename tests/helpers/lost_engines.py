"""Answers that an engine has begun and another one goes on with: what an HTTP server does when an engine is lost."""

from copy import deepcopy
from typing import Any

import numpy as np

from tests.helpers.engines import EngineHarness, Generation


def told_until(harness: EngineHarness, request_id: str, num_tokens: int) -> Generation:
    """What a client has of it when that many output tokens, or all, have been told and the engine is lost."""
    generation = harness.generations[request_id]
    while len(generation.token_ids) < num_tokens:
        harness.step()
    told = deepcopy(generation)
    told.completion = None
    return told


def go_on(
    harness: EngineHarness,
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    told: Generation,
    **fields: Any,
) -> Generation:
    """Submits what is left of it. `told` grows to what the client has in the end. fields: of the first submit."""
    told_routes = sum(len(part.topk_ids) for part in told.route_parts)
    asked = fields | {
        "output_token_ids": np.array(told.token_ids, np.int32),
        "prompt_sources": told.prompt_sources,
        "routes_start": told_routes,
        "score_prompt": fields.get("score_prompt", False) and told.prompt_scores is None,
        "is_again": True,
    }
    harness.submit(request_id, prompt, max_tokens, **asked)
    harness.generations[request_id] = told
    return told
