"""An engine that gets other weights, as clients and ranks meet it. Digests stand for the model, names for weights."""

import re
from collections.abc import Iterator

import pytest

from cluster.channel import DealerSocket
from cluster.messages import (
    CellStatus,
    Finish,
    RankLost,
    StatusQuery,
    Stop,
    SubmitAll,
    UpdateWeights,
    WeightsRefused,
    WeightsUpdated,
)
from cluster.namespace import weight_version
from cluster.rank_name import RankName
from cluster.wire import encode
from cluster.worker_messages import LoadFailure, WorkerFailed
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_cell import PATIENCE, ContentCell, make_submit
from tests.helpers.content_workers import ROOT, oracle
from tests.helpers.other_weights import fingerprint_of

PROMPT = list(range(1, 14))
LONG = 200
OTHER = "/other"
VERSION = weight_version(fingerprint_of(OTHER))
FIRST_VERSION = "digests"


@pytest.fixture
def cell() -> Iterator[ContentCell]:
    with ContentCell() as cell:
        yield cell


def update(cell: ContentCell, model_dir: str = OTHER, running: str = "abort") -> WeightsUpdated:
    cell.client.send(UpdateWeights(7, model_dir, running))
    return cell.client.answer(WeightsUpdated)


def refusal(cell: ContentCell, model_dir: str = OTHER) -> WeightsRefused:
    cell.client.send(UpdateWeights(7, model_dir, "restart"))
    return cell.client.answer(WeightsRefused)


def assert_says(cell: ContentCell, request_id: str, root: bytes, *, cached: int = 0) -> None:
    """The next request with the one prompt, in full."""
    cell.client.submit(request_id, PROMPT, 6)
    cell.client.wait_for(request_id)
    assert cell.client.tokens[request_id] == oracle(PROMPT, 6, root)[0]
    assert cell.client.completions[request_id].cached_tokens == cached


def hold_a_step(cell: ContentCell, *submits: object) -> None:
    """These run, and the ranks do not answer their step until `may_answer` is set."""
    cell.ranks.may_answer.clear()
    cell.ranks.in_step.clear()
    cell.client.send(SubmitAll(list(submits)))
    assert cell.ranks.in_step.wait(PATIENCE)


def update_in_a_step(cell: ContentCell, running: str) -> WeightsUpdated:
    """The command is there when the step ends."""
    cell.client.send(UpdateWeights(7, OTHER, running))
    cell.client.status()
    cell.ranks.may_answer.set()
    return cell.client.answer(WeightsUpdated)


# --- other weights


def test_after_an_update_answers_are_those_of_the_other_weights_and_nothing_old_is_found(
    cell: ContentCell,
) -> None:
    assert_says(cell, "first", ROOT)
    assert_says(cell, "again", ROOT, cached=12)
    updated = update(cell)
    assert (updated.query_id, updated.weight_version) == (7, VERSION)
    assert updated.fingerprint == fingerprint_of(OTHER)
    assert (updated.aborted, updated.restarted) == (0, 0)
    assert updated.evicted_nodes > 0
    assert updated.evicted_bytes > 0
    assert cell.client.status().weight_version == VERSION
    assert_says(cell, "other", OTHER.encode())
    assert_says(cell, "other again", OTHER.encode(), cached=12)
    assert cell.client.versions["again"] == {FIRST_VERSION}
    assert cell.client.versions["other"] == {VERSION}


def test_back_at_the_first_weights_the_first_answers_come_back_computed_anew(
    cell: ContentCell,
) -> None:
    for number, model_dir in enumerate(["/a", "/b", "/a"]):
        update(cell, model_dir)
        assert_says(cell, f"r{number}", model_dir.encode())
    assert cell.client.versions["r0"] == cell.client.versions["r2"]


def test_an_update_frees_the_memory_of_what_was_stored(cell: ContentCell) -> None:
    assert_says(cell, "first", ROOT)
    assert cell.client.status().store_nodes > 0
    update(cell)
    status = cell.client.status()
    assert (status.store_nodes, sum(status.kv_blocks_used), sum(status.store_bytes.values())) == (
        0,
        0,
        0,
    )


def test_who_waits_or_comes_meanwhile_runs_on_the_other_weights() -> None:
    with ContentCell(num_ranks=1, max_num_seqs=1) as cell:
        hold_a_step(cell, make_submit("running", PROMPT, LONG))
        cell.client.submit("waiting", PROMPT, 6)
        cell.checkpoints.may_read.clear()
        cell.client.send(UpdateWeights(7, OTHER, "abort"))
        cell.client.status()
        cell.ranks.may_answer.set()
        while (status := cell.client.status()).ready:
            pass
        assert status.reason == "weights are read from /other"
        assert status.weight_version == FIRST_VERSION
        cell.client.submit("meanwhile", PROMPT, 6)
        cell.client.status()
        cell.checkpoints.may_read.set()
        assert cell.client.answer(WeightsUpdated).aborted == 1
        cell.client.wait_for("waiting", "meanwhile")
        for request_id in ("waiting", "meanwhile"):
            assert cell.client.tokens[request_id] == oracle(PROMPT, 6, OTHER.encode())[0]
            assert cell.client.versions[request_id] == {VERSION}
        assert cell.client.status().ready


def test_no_more_may_come_meanwhile_than_may_wait() -> None:
    with ContentCell(max_num_waiting=1) as cell:
        cell.checkpoints.may_read.clear()
        cell.client.send(UpdateWeights(7, OTHER, "abort"))
        for request_id in ("taken", "too many"):
            cell.client.submit(request_id, PROMPT, 2)
        cell.client.wait_for("too many")
        assert cell.client.refusals["too many"].kind == "overloaded"
        cell.checkpoints.may_read.set()
        cell.client.wait_for("taken")
        assert cell.client.tokens["taken"] == oracle(PROMPT, 2, OTHER.encode())[0]


# --- who runs


def test_who_runs_is_aborted_with_an_error_that_says_why(cell: ContentCell) -> None:
    hold_a_step(cell, make_submit("running", PROMPT, LONG))
    updated = update_in_a_step(cell, "abort")
    assert (updated.aborted, updated.restarted) == (1, 0)
    completion = cell.client.completions["running"]
    assert (completion.finish_reason, completion.again) == ("abort", False)
    assert completion.error == f"the weights were exchanged for {VERSION} while it ran"
    status = cell.client.status()
    assert (status.num_running, status.kv_blocks_leased) == (0, 0)


@pytest.mark.parametrize(("is_streamed", "again"), [(False, True), (True, False)])
def test_to_restart_is_for_those_whose_clients_have_seen_nothing(
    cell: ContentCell, is_streamed: bool, again: bool
) -> None:
    submit = make_submit("running", PROMPT, LONG, is_streamed=is_streamed)
    cell.client.send(SubmitAll([submit]))
    cell.client.wait_for_token("running")
    updated = update(cell, running="restart")
    assert (updated.aborted, updated.restarted) == (int(not again), int(again))
    assert cell.client.completions["running"].again is again


def test_a_stream_that_has_not_said_anything_is_restarted(cell: ContentCell) -> None:
    long_prompt = PROMPT * 4  # more than the tokens of a step
    hold_a_step(cell, make_submit("running", long_prompt, 6, is_streamed=True))
    assert update_in_a_step(cell, "restart").restarted == 1
    assert cell.client.completions["running"].again


def test_an_answer_is_restarted_with_its_choices_that_have_ended_and_those_that_wait() -> None:
    with ContentCell(num_ranks=1, max_num_seqs=2) as cell:
        choices = [make_submit(f"c{i}", [i, *PROMPT], 2 if i == 0 else LONG) for i in range(4)]
        cell.client.send(SubmitAll(choices))
        cell.client.wait_for("c0")
        cell.client.wait_for_token("c2")
        updated = update(cell, running="restart")
        assert (updated.aborted, updated.restarted) == (0, 3)
        assert [cell.client.completions[f"c{i}"].again for i in range(4)] == [False, *[True] * 3]


def test_what_is_submitted_again_is_taken_although_the_queue_is_full() -> None:
    with ContentCell(num_ranks=1, max_num_seqs=1, max_num_waiting=1) as cell:
        hold_a_step(cell, make_submit("running", PROMPT, 5))
        cell.client.submit("waiting", PROMPT, 4)
        cell.client.send(SubmitAll([make_submit("again", PROMPT, 3, is_again=True)]))
        cell.client.submit("too many", PROMPT, 2)
        cell.client.status()
        cell.ranks.may_answer.set()
        cell.client.wait_for("running", "waiting", "again", "too many")
        assert set(cell.client.refusals) == {"too many"}
        assert cell.client.tokens["again"] == oracle(PROMPT, 3)[0]


def test_a_stop_string_that_was_complete_before_still_ends_its_request(cell: ContentCell) -> None:
    cell.client.submit("done", PROMPT, LONG)
    cell.client.wait_for_token("done")
    cell.checkpoints.may_read.clear()
    cell.client.send(UpdateWeights(7, OTHER, "abort"))
    while cell.client.status().ready:
        pass
    cell.client.send(Finish("done", 1))
    cell.client.status()
    cell.checkpoints.may_read.set()
    assert cell.client.answer(WeightsUpdated).aborted == 0
    completion = cell.client.completions["done"]
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", 1)


# --- refused: all is as it was


def test_a_directory_that_cannot_be_served_is_refused_and_nobody_notices(
    cell: ContentCell,
) -> None:
    assert_says(cell, "first", ROOT)
    cell.client.submit("running", PROMPT[::-1], 40)
    refused = refusal(cell, "/bad")
    assert (refused.kind, refused.query_id) == ("invalid", 7)
    assert refused.reason == "/bad: hidden_size is 1, that of the served model is 2"
    cell.client.wait_for("running")
    assert cell.client.tokens["running"] == oracle(PROMPT[::-1], 40)[0]
    assert_says(cell, "later", ROOT, cached=12)


@pytest.mark.parametrize(("of_checkpoint", "kind"), [(True, "invalid"), (False, "unavailable")])
def test_when_one_rank_cannot_load_all_go_on_with_what_they_have(
    cell: ContentCell, of_checkpoint: bool, kind: str
) -> None:
    assert_says(cell, "first", ROOT)
    cell.client.submit("running", PROMPT[::-1], 40)
    cell.ranks.load_failures[1] = LoadFailure("tensor t is missing", of_checkpoint)
    refused = refusal(cell)
    assert (refused.kind, refused.reason) == (kind, "rank 1: tensor t is missing")
    cell.client.wait_for("running")
    assert cell.client.tokens["running"] == oracle(PROMPT[::-1], 40)[0]
    assert_says(cell, "later", ROOT, cached=12)
    assert cell.ranks.num_discards == 2
    assert cell.client.status().weight_version == FIRST_VERSION
    cell.ranks.load_failures.clear()
    update(cell)
    assert_says(cell, "other", OTHER.encode())


@pytest.mark.parametrize(
    ("rooms", "reason"),
    [
        (
            {0: ("a", 60, 100), 1: ("a", 60, 101)},
            "ranks 0, 1 of one host need 120 bytes .* 100 are",
        ),
        (
            {0: ("a", 60, 100), 1: ("b", 60, 59)},
            "rank 1 needs 60 bytes of its memory .* 59 are free",
        ),
    ],
)
def test_shares_that_do_not_fit_a_host_together_are_refused_before_anybody_reads(
    cell: ContentCell, rooms: dict[int, tuple[str, int, int]], reason: str
) -> None:
    cell.ranks.rooms = rooms
    refused = refusal(cell)
    assert refused.kind == "unavailable"
    assert re.search(reason, refused.reason)
    assert cell.ranks.num_prepared == 0
    assert_says(cell, "later", ROOT)


@pytest.mark.parametrize(
    "rooms",
    [{0: ("a", 60, 120), 1: ("a", 60, 120)}, {0: ("a", 60, 60), 1: ("b", 60, 60)}],
    ids=["one host", "two hosts"],
)
def test_shares_that_just_fit_their_hosts_are_read(
    cell: ContentCell, rooms: dict[int, tuple[str, int, int]]
) -> None:
    cell.ranks.rooms = rooms
    update(cell)
    assert_says(cell, "other", OTHER.encode())


def test_a_rank_that_finds_the_directory_wrong_is_named_before_anybody_reads(
    cell: ContentCell,
) -> None:
    cell.ranks.unmeasurable.add(1)
    refused = refusal(cell)
    assert (refused.kind, refused.reason) == ("invalid", "rank 1: no tensors")
    assert cell.ranks.num_prepared == 0


def test_a_rank_that_sees_other_files_is_named(cell: ContentCell) -> None:
    cell.ranks.other_files.add(1)
    refused = refusal(cell)
    assert refused.kind == "invalid"
    assert refused.reason.startswith("rank 1 has read other files in /other than the engine")
    assert_says(cell, "later", ROOT)


def test_a_second_update_is_refused_while_one_is_under_way(cell: ContentCell) -> None:
    cell.checkpoints.may_read.clear()
    cell.client.send(UpdateWeights(7, OTHER, "abort"))
    cell.client.send(UpdateWeights(8, "/third", "abort"))
    refused = cell.client.answer(WeightsRefused)
    assert (refused.query_id, refused.kind) == (8, "conflict")
    cell.checkpoints.may_read.set()
    assert cell.client.answer(WeightsUpdated).query_id == 7
    assert update(cell, "/third").fingerprint == fingerprint_of("/third")


def test_a_cell_that_still_starts_takes_no_other_weights() -> None:
    with ContentCell(ranks_come=False) as cell:
        refused = refusal(cell)
        assert (refused.kind, refused.reason) == ("unavailable", "starting")


# --- failures


def test_a_rank_that_never_says_that_it_has_read_is_named_at_the_deadline() -> None:
    with ContentCell(load_timeout_seconds=5.0) as cell:
        cell.ranks.silent_loaders.add(1)
        refused = refusal(cell)
        assert refused.kind == "unavailable"
        assert refused.reason.startswith("rank 1 did not read its weights within 5 s")
        assert cell.client.status().reason == refused.reason


def test_a_directory_that_cannot_be_read_in_time_is_refused_and_the_cell_serves_on() -> None:
    with ContentCell(load_timeout_seconds=5.0) as cell:
        cell.checkpoints.may_read.clear()
        refused = refusal(cell)
        assert refused.reason.startswith("/other was not read within 5 s")
        assert_says(cell, "later", ROOT)
        cell.checkpoints.may_read.set()


def test_a_rank_that_dies_while_it_loads_ends_a_cell_that_does_not_recover(
    cell: ContentCell,
) -> None:
    cell.client.submit("running", PROMPT, LONG)
    cell.client.wait_for_token("running")
    cell.ranks.silent_loaders.add(1)
    cell.client.send(UpdateWeights(7, OTHER, "restart"))
    while cell.client.status().ready:
        pass
    cell.client.send(RankLost(1, "SIGKILL"))
    assert cell.client.answer(WeightsRefused).reason == "rank 1 is lost: SIGKILL"
    cell.client.wait_for("running")
    assert cell.client.completions["running"].error == "rank 1 is lost: SIGKILL"
    assert not cell.client.status().ready


def test_a_rank_that_fails_while_the_directory_is_read_is_the_failure(cell: ContentCell) -> None:
    cell.checkpoints.may_read.clear()
    cell.client.send(UpdateWeights(7, OTHER, "restart"))
    while cell.client.status().ready:
        pass
    worker = DealerSocket(str(RankName(2)), KEYS.worker)
    worker.connect(cell.service.worker_endpoint)
    worker.send(encode(WorkerFailed(1, 0, "device lost")))
    assert cell.client.answer(WeightsRefused).reason == "rank 1 is lost: device lost"
    worker.close()
    cell.checkpoints.may_read.set()


def test_stop_does_not_wait_for_ranks_that_load(cell: ContentCell) -> None:
    cell.client.submit("running", PROMPT, LONG)
    cell.client.wait_for_token("running")
    cell.ranks.silent_loaders.add(0)
    cell.client.send(UpdateWeights(7, OTHER, "restart"))
    while cell.client.status().ready:
        pass
    cell.client.send(Stop("maintenance"))
    cell.client.wait_for("running")
    assert cell.client.completions["running"].error == "the server is stopping: maintenance"
    cell.join()
    assert cell.failure is None


def test_status_is_answered_while_ranks_load(cell: ContentCell) -> None:
    cell.checkpoints.may_read.clear()
    cell.client.send(UpdateWeights(7, OTHER, "restart"))
    cell.client.send(StatusQuery(1))
    assert cell.client.answer(CellStatus).weight_version == FIRST_VERSION
    cell.checkpoints.may_read.set()
    assert cell.client.answer(WeightsUpdated).weight_version == VERSION
