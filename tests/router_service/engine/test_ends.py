"""How requests end, are refused or fail, and that nothing of them stays behind."""

import numpy as np
import pytest

from cluster.errors import CellError, OverloadedError, RankLostError, RequestError
from cluster.messages import SamplingParams, Submit
from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt
from tests.helpers.content_workers import (
    oracle,
)
from tests.helpers.engines import CLIENT


def test_an_abort_gives_back_blocks_and_leases_at_once() -> None:
    harness = make_harness(budget=8)
    harness.submit("gone", make_prompt(30), 30)
    harness.submit("queued", make_prompt(30), 30)
    for _ in range(6):
        harness.step()
    harness.engine.abort(CLIENT, "gone")
    harness.engine.abort(CLIENT, "queued")
    harness.engine.abort(CLIENT, "never existed")
    assert not harness.engine.has_work
    harness.engine.check_invariants()
    harness.engine.evict("all")
    assert harness.store.stats().kv_blocks_used == (0,)
    assert harness.engine._workers.sequences == set()


def test_a_stop_string_cuts_tokens_and_routes_at_the_token_that_completed_it() -> None:
    harness = make_harness()
    prompt = make_prompt(6)
    harness.submit("r", prompt, 50)
    for _ in range(8):
        harness.step()
    harness.engine.finish(CLIENT, "r", 4)
    harness.run()
    completion = harness.generations["r"].completion
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", 4)
    np.testing.assert_array_equal(harness.generations["r"].routes.topk_ids, oracle(prompt, 4)[1])


def test_an_end_of_sequence_token_stops_and_counts() -> None:
    harness = make_harness()
    prompt = make_prompt(6)
    tokens, _ = oracle(prompt, 10)
    harness.submit("r", prompt, 10, stop_token_ids=(tokens[3],))
    harness.run()
    generation = harness.generations["r"]
    stop = tokens.index(tokens[3]) + 1
    assert generation.token_ids == tokens[:stop]
    assert generation.completion.finish_reason == "stop"


def test_a_poisoned_request_ends_with_an_error_and_nothing_of_it_is_stored() -> None:
    harness = make_harness(budget=64)
    harness.engine._workers.poisoned.add(0)
    prompt, healthy = make_prompt(20), make_prompt(20, seed=1)
    harness.submit("bad", prompt, 5)
    harness.submit("good", healthy, 5)
    harness.run()
    assert harness.generations["bad"].completion.finish_reason == "error"
    assert_undisturbed(harness.generations["good"], healthy, 5)
    assert harness.generate("again", prompt, 5).completion.cached_tokens == 0


def test_a_lost_rank_ends_every_request_with_one_error_that_names_it() -> None:
    harness = make_harness(2)
    for i in range(3):
        harness.submit(f"r{i}", make_prompt(20, seed=i), 5)
    harness.step()
    harness.engine._workers.dead_rank = 1
    with pytest.raises(RankLostError, match="rank 1") as lost:
        harness.step()
    harness.engine.fail_all(str(lost.value))
    harness.collect()
    for generation in harness.generations.values():
        assert generation.completion.finish_reason == "error"
        assert "rank 1" in generation.completion.error
    harness.engine.check_invariants()


def test_routes_that_never_arrive_are_an_error_that_names_the_rank() -> None:
    harness = make_harness(frame_delay=10**9)
    harness.engine._workers.frames = lambda timeout: []
    harness.submit("r", make_prompt(5), 1)
    harness.step()
    with pytest.raises(CellError, match="rank 0"):
        harness.step()


def test_a_full_queue_and_a_request_that_never_fits_are_refused_with_the_limit() -> None:
    harness = make_harness(max_num_waiting=1, num_kv_blocks=8)
    harness.submit("r", make_prompt(5), 1)
    with pytest.raises(OverloadedError, match="max_num_waiting"):
        harness.submit("s", make_prompt(5), 1)
    harness.run()
    with pytest.raises(RequestError, match="8: shorten"):
        harness.submit("t", make_prompt(30), 3)
    harness.submit("u", make_prompt(30), 2)
    harness.run()
    assert_undisturbed(harness.generations["u"], make_prompt(30), 2)


@pytest.mark.parametrize("token_id", [-1, 50])
def test_a_barred_id_that_the_model_lacks_is_refused_and_reaches_no_rank(token_id: int) -> None:
    harness = make_harness(vocab_size=50)
    with pytest.raises(RequestError, match="0 to 49"):
        harness.submit("r", [1, 2], 4, min_tokens=1, barred_token_ids=(3, token_id))
    assert not harness.engine.has_work


def test_the_engine_is_idle_when_all_is_done() -> None:
    harness = make_harness()
    harness.generate("r", make_prompt(5), 3)
    assert not harness.engine.has_work
    assert harness.engine.take_deltas() == []


def test_an_id_that_is_in_use_is_refused_and_its_request_goes_on() -> None:
    harness = make_harness()
    prompt = make_prompt(9)
    harness.submit("r", prompt, 5)
    first = harness.generations["r"]
    harness.step()
    with pytest.raises(RequestError, match="'r' is in use"):
        harness.submit("r", prompt, 5)
    harness.generations["r"] = first
    harness.run()
    assert_undisturbed(first, prompt, 5)
    assert_undisturbed(harness.generate("r", prompt, 5), prompt, 5)


def test_all_requests_of_one_client_can_be_aborted_and_those_of_others_go_on() -> None:
    harness = make_harness(max_num_seqs=2)
    prompt = make_prompt(9)
    harness.submit("mine", prompt, 5)
    prompts = [np.array(make_prompt(9, seed=seed), np.int32) for seed in range(1, 6)]
    for number, other in enumerate(prompts):
        sampling = SamplingParams(5, 0.0, 1.0, None, ())
        harness.engine.submit(b"gone", Submit(f"r{number}", other, sampling, None, False))
    harness.engine.step()
    harness.engine.abort_all(b"gone")
    harness.collect()
    harness.run()
    assert_undisturbed(harness.generations["mine"], prompt, 5)
    assert harness.engine._workers.sequences == set()
