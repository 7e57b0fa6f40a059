"""The engine as its clients and workers meet it: real sockets, one thread for the service, one for all ranks."""

from collections.abc import Iterator

import numpy as np
import pytest

from cluster.channel import DealerSocket
from cluster.messages import (
    Abort,
    CellStatus,
    EvictCommand,
    EvictReport,
    FeaturesCommand,
    FeaturesReport,
    FeatureStates,
    Finish,
    MetricsQuery,
    MetricsText,
    RankLost,
    Refused,
    SamplingParams,
    StatusQuery,
    Stop,
    Submit,
    SubmitAll,
)
from cluster.prefix_match import Publication
from cluster.rank_name import RankName
from cluster.rank_place import RankPlace
from cluster.wire import encode
from cluster.worker_messages import WorkerFailed, WorkerReady
from prefix_store.store import PrefixStore
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_cell import PATIENCE, Client, ContentCell, make_identity
from tests.helpers.content_workers import oracle

PROMPT = list(range(1, 14))
LONG = 200


@pytest.fixture
def cell() -> Iterator[ContentCell]:
    with ContentCell() as cell:
        yield cell


class BrokenStore(PrefixStore):
    """Fails as only a bug of ours could make it fail."""

    def publish(self, *_: object) -> Publication:
        raise AssertionError("the tree is not a tree")


def hold_a_step(cell: ContentCell, request_id: str = "running") -> None:
    """A request is running and the ranks do not answer its step until `may_answer` is set."""
    cell.ranks.may_answer.clear()
    cell.ranks.in_step.clear()
    cell.client.submit(request_id, PROMPT, LONG)
    assert cell.ranks.in_step.wait(PATIENCE)


# --- serving


def test_a_request_streams_its_tokens_and_ends_with_one_completion(cell: ContentCell) -> None:
    cell.client.submit("r", PROMPT, 9)
    cell.client.wait_for("r")
    assert cell.client.tokens["r"] == oracle(PROMPT, 9)[0]
    assert cell.client.completions["r"].finish_reason == "length"


def test_requests_of_two_http_servers_with_one_id_do_not_meet(cell: ContentCell) -> None:
    other = Client(cell.service.client_endpoint, "http-1")
    prompts = {cell.client: PROMPT, other: PROMPT[::-1]}
    for client, prompt in prompts.items():
        client.submit("r", prompt, 6)
    for client, prompt in prompts.items():
        client.wait_for("r")
        assert client.tokens["r"] == oracle(prompt, 6)[0]
    other.socket.close()


def test_a_stop_string_ends_a_request_while_its_step_runs(cell: ContentCell) -> None:
    cell.client.submit("r", PROMPT, LONG)
    cell.client.wait_for_token("r")
    cell.client.send(Finish("r", 1))
    cell.client.wait_for("r")
    completion = cell.client.completions["r"]
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", 1)


def test_status_and_metrics_are_answered_while_a_step_runs(cell: ContentCell) -> None:
    hold_a_step(cell)
    status = cell.client.status()
    assert (status.ready, status.num_running, status.steps_total) == (True, 1, 0)
    cell.client.send(MetricsQuery(5))
    text = cell.client.answer(MetricsText)
    assert text.query_id == 5
    assert b"pointsman_requests_running 1.0" in text.text


def test_an_eviction_waits_for_the_end_of_the_step_and_is_answered(cell: ContentCell) -> None:
    cell.client.submit("r", PROMPT, 4)
    cell.client.wait_for("r")
    hold_a_step(cell)
    cell.client.send(EvictCommand(3, "all"))
    cell.client.status()
    cell.ranks.may_answer.set()
    report = cell.client.answer(EvictReport)
    assert (report.query_id, report.part) == (3, "all")
    assert report.nodes + report.kept_leased > 0


def test_features_are_switched_at_the_end_of_the_step(cell: ContentCell) -> None:
    hold_a_step(cell)
    cell.client.send(FeaturesCommand(4, None, False, False))
    assert cell.client.status().features.prefix_store
    cell.ranks.may_answer.set()
    switched = FeatureStates(route_replay=True, planned_dispatch=False, prefix_store=False)
    assert cell.client.answer(FeaturesReport) == FeaturesReport(4, switched)
    assert cell.client.status().features == switched
    cell.client.send(Abort("running"))
    cell.client.submit("r", PROMPT, 3)
    cell.client.wait_for("r")
    assert cell.client.tokens["r"] == oracle(PROMPT, 3)[0]
    assert cell.client.completions["r"].cached_tokens == 0


def test_an_aborted_request_is_gone_and_nothing_more_is_said_of_it(cell: ContentCell) -> None:
    cell.client.submit("gone", PROMPT, LONG)
    cell.client.wait_for_token("gone")
    cell.client.send(Abort("gone"))
    cell.client.send(Abort("never existed"))
    cell.client.submit("next", PROMPT, 3)
    cell.client.wait_for("next")
    assert "gone" not in cell.client.completions
    assert cell.client.status().num_running == 0


# --- refusals


def test_a_full_queue_is_refused_as_overloaded() -> None:
    with ContentCell(max_num_waiting=1) as cell:
        hold_a_step(cell)
        for request_id in ("queued", "too many"):
            cell.client.submit(request_id, PROMPT, 2)
        cell.ranks.may_answer.set()
        cell.client.wait_for("too many", "queued")
        assert cell.client.refusals["too many"].kind == "overloaded"
        assert "max_num_waiting" in cell.client.refusals["too many"].reason


def test_more_than_may_wait_are_refused_while_the_step_still_runs() -> None:
    with ContentCell(max_num_waiting=2) as cell:
        hold_a_step(cell)
        for request_id in ("first", "second", "too many"):
            cell.client.submit(request_id, PROMPT, 2)
        cell.client.wait_for("too many")
        refusal = cell.client.refusals["too many"]
        assert (refusal.kind, refusal.reason) == (
            "overloaded",
            "2 requests are waiting and 1 would come; the bound is 2 (scheduler.max_num_waiting); try "
            "again later",
        )
        assert not cell.ranks.may_answer.is_set()
        cell.client.send(Abort("first"))
        cell.ranks.may_answer.set()
        cell.client.wait_for("second", "running")
        assert cell.client.tokens["second"] == oracle(PROMPT, 2)[0]
        for request_id in ("third", "fourth"):
            cell.client.submit(request_id, PROMPT, 2)
        cell.client.wait_for("third", "fourth")
        assert set(cell.client.refusals) == {"too many"}


def test_a_request_that_can_never_fit_is_refused_as_invalid(cell: ContentCell) -> None:
    cell.client.submit("huge", PROMPT, 1000)
    cell.client.wait_for("huge")
    assert cell.client.refusals["huge"].kind == "invalid"


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [
        (np.zeros((2, 2), np.int32), 4),
        (np.zeros(3, np.float32), 4),
        (np.zeros(0, np.int32), 4),
        (np.zeros(3, np.int32), -5),
    ],
)
def test_a_submit_that_no_http_server_of_ours_sends_is_refused_and_hurts_nobody(
    cell: ContentCell, prompt: np.ndarray, max_tokens: int
) -> None:
    sampling = SamplingParams(max_tokens, 0.0, 1.0, None, ())
    cell.client.send(SubmitAll([Submit("odd", prompt, sampling, None, False)]))
    cell.client.submit("r", PROMPT, 3)
    cell.client.wait_for("odd", "r")
    assert cell.client.refusals["odd"].kind == "invalid"
    assert cell.client.tokens["r"] == oracle(PROMPT, 3)[0]


@pytest.mark.parametrize("parts", [[b"\x01nonsense"], [b""], [b"\x63"], [b"", b"a", b"b"]])
def test_frames_that_are_no_message_are_dropped_and_hurt_nobody(
    cell: ContentCell, parts: list[bytes]
) -> None:
    cell.client.socket.socket.send_multipart(parts)
    cell.client.submit("r", PROMPT, 3)
    cell.client.wait_for("r")
    assert cell.client.tokens["r"] == oracle(PROMPT, 3)[0]


def test_a_peer_with_a_name_that_is_no_text_may_leave_before_its_tokens(cell: ContentCell) -> None:
    hold_a_step(cell)
    stranger = DealerSocket("stranger", KEYS.http_server)
    stranger.socket.identity = b"\xff\xfe"
    stranger.connect(cell.service.client_endpoint)
    sampling = SamplingParams(3, 0.0, 1.0, None, ())
    submit = Submit("r", np.array(PROMPT, np.int32), sampling, None, False)
    stranger.send(encode(SubmitAll([submit])))
    stranger.send(encode(StatusQuery(1)))
    assert stranger.receive(PATIENCE) is not None
    stranger.close()
    cell.ranks.may_answer.set()
    cell.client.wait_for("running")
    assert cell.client.completions["running"].finish_reason == "length"


# --- an HTTP server that is gone


def test_all_requests_of_an_http_server_that_is_gone_end_also_those_that_wait() -> None:
    with ContentCell(max_num_seqs=1) as cell:
        other = Client(cell.service.client_endpoint, "http-1")
        for number in range(20):
            other.submit(f"r{number}", [number, *PROMPT], LONG)
        other.wait_for_token("r0")
        other.socket.close()
        cell.client.submit("mine", PROMPT, 3)
        cell.client.wait_for("mine")
        assert cell.client.tokens["mine"] == oracle(PROMPT, 3)[0]
        status = cell.client.status()
        assert (status.num_waiting, status.num_running, status.kv_blocks_leased) == (0, 0, 0)
        assert status.steps_total < 2 * LONG


# --- starting


def test_while_starting_status_says_so_and_submits_are_refused_at_once() -> None:
    with ContentCell(ranks_come=False) as cell:
        assert (cell.client.status().ready, cell.client.status().reason) == (False, "starting")
        cell.client.submit("early", PROMPT, 3)
        cell.client.wait_for("early")
        assert cell.client.refusals["early"] == Refused("early", "unavailable", "starting", None)
        cell.client.send(EvictCommand(2, "all"))
        assert cell.client.answer(EvictReport).nodes == 0


def test_while_starting_features_are_switched() -> None:
    with ContentCell(ranks_come=False) as cell:
        cell.client.send(FeaturesCommand(3, False, None, None))
        report = cell.client.answer(FeaturesReport)
        assert (report.query_id, report.features.route_replay) == (3, False)
        assert not cell.client.status().features.route_replay


def test_stop_ends_a_cell_that_is_still_starting() -> None:
    with ContentCell(ranks_come=False) as cell:
        cell.client.send(Stop("never mind"))
        cell.join()
        assert (cell.failure, cell.error) == (None, None)


def test_a_rank_lost_while_starting_is_the_failure() -> None:
    with ContentCell(ranks_come=False) as cell:
        cell.client.send(RankLost(1, "no GPU"))
        assert cell.client.status().reason == "rank 1 is lost: no GPU"
        cell.client.send(Stop("read"))
        cell.join()
        assert cell.failure == "rank 1 is lost: no GPU"


# --- the end


def test_stop_ends_running_and_waiting_requests_with_its_reason() -> None:
    with ContentCell(max_num_seqs=1, num_ranks=1) as cell:
        hold_a_step(cell)
        cell.client.submit("waiting", PROMPT[::-1], 5)
        cell.client.send(Stop("maintenance"))
        cell.client.submit("late", PROMPT, 5)
        cell.client.status()
        cell.ranks.may_answer.set()
        cell.client.wait_for("running", "waiting", "late")
        cell.join()
        assert cell.failure is None
        assert cell.client.completions["running"].error == "the server is stopping: maintenance"
        for request_id in ("waiting", "late"):
            assert "maintenance" in cell.client.refusals[request_id].reason


def test_a_dead_rank_ends_every_request_with_one_error_that_names_it(cell: ContentCell) -> None:
    cell.client.submit("a", PROMPT, LONG)
    cell.client.submit("b", PROMPT[::-1], LONG)
    cell.client.wait_for_token("a")
    cell.client.wait_for_token("b")
    cell.ranks.hang_up(1)
    cell.client.send(RankLost(1, "SIGKILL"))
    cell.client.wait_for("a", "b")
    for request_id in ("a", "b"):
        assert "rank 1 is lost" in cell.client.completions[request_id].error
    status = cell.client.status()
    assert not status.ready
    assert "rank 1 is lost" in status.reason
    cell.client.submit("c", PROMPT, 3)
    cell.client.wait_for("c")
    assert cell.client.refusals["c"].kind == "unavailable"


def test_a_rank_that_is_silent_in_a_step_is_named_at_the_deadline() -> None:
    with ContentCell(step_timeout_seconds=0.5) as cell:
        cell.client.submit("r", PROMPT, LONG)
        cell.client.wait_for_token("r")
        cell.ranks.may_answer.clear()
        cell.client.wait_for("r")
        assert "rank 0, 1 did not answer step" in cell.client.completions["r"].error


def test_a_rank_lost_while_idle_is_the_failure(cell: ContentCell) -> None:
    cell.client.send(RankLost(0, "SIGKILL"))
    assert cell.client.status().reason == "rank 0 is lost: SIGKILL"


def test_a_worker_that_fails_while_idle_is_the_failure(cell: ContentCell) -> None:
    worker = DealerSocket(str(RankName(2)), KEYS.worker)
    worker.connect(cell.service.worker_endpoint)
    worker.send(encode(WorkerFailed(1, 0, "device lost")))
    while (status := cell.client.status()).ready:
        pass
    assert status.reason == "rank 1 is lost: device lost"
    worker.close()


def test_a_bug_in_the_engine_ends_every_request_with_an_error_and_then_the_engine() -> None:
    with ContentCell(store_class=BrokenStore) as cell:
        cell.client.submit("r", PROMPT, LONG)
        cell.client.wait_for("r")
        assert "AssertionError: the tree is not a tree" in cell.client.completions["r"].error
        cell.client.send(StatusQuery(1))
        assert not cell.client.answer(CellStatus).ready
        cell.client.send(Stop("read"))
        cell.join()
        assert isinstance(cell.error, AssertionError)


def test_a_late_word_of_a_worker_while_idle_is_no_failure(cell: ContentCell) -> None:
    worker = DealerSocket(str(RankName(2)), KEYS.worker)
    worker.connect(cell.service.worker_endpoint)
    worker.send(
        encode(WorkerReady(1, 0, make_identity(2), "first life", RankPlace("127.0.0.1", "cpu")))
    )
    cell.client.submit("r", PROMPT, 3)
    cell.client.wait_for("r")
    assert cell.client.status().ready
    worker.close()
