"""Requests that give up their blocks and come back."""

import numpy as np
import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt
from tests.helpers.content_workers import (
    oracle,
)
from tests.helpers.engines import CLIENT


@pytest.mark.parametrize("frame_delay", [0, 3])
def test_preempted_requests_go_on_with_their_own_routes(frame_delay: int) -> None:
    harness = make_harness(num_kv_blocks=14, budget=8, frame_delay=frame_delay)
    prompts = {f"r{i}": make_prompt(9 + i, seed=i) for i in range(5)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, 20)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert_undisturbed(harness.generations[request_id], prompt, 20)


def test_a_request_stopped_while_preempted_ends_with_the_tokens_that_it_had() -> None:
    harness = make_harness(num_kv_blocks=8, budget=8)
    prompts = {"old": make_prompt(9, seed=1), "young": make_prompt(9, seed=2)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, 20)
    while not (harness.scheduler.num_preemptions and harness.engine.num_waiting):
        harness.step()
    num_tokens = len(harness.generations["young"].token_ids)
    harness.engine.finish(CLIENT, "young", num_tokens)
    harness.run()
    completion = harness.generations["young"].completion
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", num_tokens)
    np.testing.assert_array_equal(
        harness.generations["young"].routes.topk_ids, oracle(prompts["young"], num_tokens)[1]
    )
