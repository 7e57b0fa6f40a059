"""Who goes on when an engine is lost, and with what: decisions over what has come, without a socket."""

from typing import Any

import numpy as np
import pytest

from cluster.errors import CellError, DeadlineError
from cluster.messages import (
    Completion,
    OutputDelta,
    PromptSources,
    Refused,
    RoutePart,
    SamplingParams,
    Submit,
)
from cluster.scores import ScoreColumns
from router_service.to_engine.open_answer import MAX_UNREAD_DELTAS, OpenAnswer, Outcome
from router_service.to_engine.open_answers import OpenAnswers
from router_service.to_engine.seeds import with_seeds

LIMIT = 10.0
DONE = Completion("length", None, 8, 0, 0)


def submit(request_id: str, **fields: Any) -> Submit:
    sampling = SamplingParams(8, 1.0, 1.0, 7, (), min_tokens=3)
    return Submit(request_id, np.arange(5, dtype=np.int32), sampling, None, True, **fields)


def delta(request_id: str, *token_ids: int, **fields: Any) -> OutputDelta:
    return OutputDelta(request_id, list(token_ids), fields.pop("completion", None), **fields)


def routes(start: int, num_tokens: int) -> RoutePart:
    return RoutePart(start, np.zeros((num_tokens, 1, 1), np.uint8), None)


def opened(*submits: Submit, limit: float = LIMIT) -> tuple[OpenAnswers, OpenAnswer]:
    table, answer = OpenAnswers(limit), OpenAnswer(submits)
    table.open(answer)
    return table, answer


def read(answer: OpenAnswer) -> list[Outcome]:
    return [answer.outcomes.get_nowait() for _ in range(answer.outcomes.qsize())]


def told(answer: OpenAnswer) -> list[int]:
    return [
        i for outcome in read(answer) if isinstance(outcome, OutputDelta) for i in outcome.token_ids
    ]


def test_what_is_left_goes_on_behind_all_that_was_taken() -> None:
    table, answer = opened(submit("r", score_prompt=True, routes_start=2))
    sources = PromptSources(4, 0)
    table.take(delta("r", routes=routes(2, 3)), 0.0)
    table.take(delta("r", 10, prompt_sources=sources), 0.0)
    table.take(delta("r", prompt_scores=ScoreColumns.empty()), 0.0)
    table.lose(1.0)
    table.take(delta("r", 11, 12), 1.0)
    (rest,) = table.rest_of(answer)
    assert rest.output_token_ids is not None
    assert rest.output_token_ids.tolist() == [10, 11, 12], "a late frame was lost"
    assert (rest.routes_start, rest.score_prompt, rest.is_again) == (5, False, True)
    assert rest.prompt_sources == sources
    assert rest.sampling == answer.requests[0].submit.sampling


def test_a_frame_of_before_that_is_read_behind_the_submit_is_nobodys() -> None:
    table, answer = opened(submit("r"))
    table.take(delta("r", 10), 0.0)
    table.lose(1.0)
    (rest,) = table.rest_of(answer)
    table.take(delta("r", 11), 1.0)
    table.take(delta("r", completion=DONE), 1.0)
    table.take(delta(rest.request_id, 11), 2.0)
    table.lose(3.0)
    (again,) = table.rest_of(answer)
    table.take(delta(rest.request_id, 12), 3.0)
    table.take(delta(again.request_id, 12), 3.0)
    assert told(answer) == [10, 11, 12]
    assert len({"r", rest.request_id, again.request_id}) == 3


def test_the_consumer_reads_its_own_ids() -> None:
    table, answer = opened(submit("r"))
    table.lose(1.0)
    (rest,) = table.rest_of(answer)
    table.take(delta(rest.request_id, 11), 2.0)
    (outcome,) = read(answer)
    assert isinstance(outcome, OutputDelta)
    assert outcome.request_id == "r"


def test_an_answer_of_which_nothing_was_told_is_submitted_as_it_was() -> None:
    table, answer = opened(submit("r"))
    table.take(delta("r", routes=routes(0, 3)), 0.0)
    table.lose(1.0)
    (rest,) = table.rest_of(answer)
    assert rest.output_token_ids is None


def test_choices_go_on_without_those_that_have_ended() -> None:
    table, answer = opened(
        submit("a"), submit("b", choice=1, leader_id="a"), submit("c", choice=2, leader_id="a")
    )
    table.take(delta("b", 10, completion=DONE), 0.0)
    table.lose(1.0)
    first, third = table.rest_of(answer)
    assert (first.choice, third.choice, third.leader_id) == (0, 2, first.request_id)
    assert third.output_token_ids is not None, "another choice of it was told"
    assert len(third.output_token_ids) == 0
    table.take(delta(first.request_id, 11, completion=DONE), 2.0)
    table.lose(3.0)
    (third,) = table.rest_of(answer)
    assert third.leader_id is None


def test_one_that_has_ended_is_not_submitted_again() -> None:
    table, answer = opened(submit("r"))
    table.take(delta("r", 10, completion=DONE), 0.0)
    table.lose(1.0)
    assert table.waiting() == []
    assert (table.num_held, table.take_stale_ids()) == (0, [])
    table.expire(1000.0)
    assert told(answer) == [10]


def test_one_whose_end_is_taken_while_it_is_held_is_not_submitted_again() -> None:
    table, _ = opened(submit("r"))
    table.lose(1.0)
    table.take(delta("r", 10, completion=DONE), 1.0)
    assert (table.waiting(), table.num_held) == ([], 0)


@pytest.mark.parametrize("num_final", [1, 4])
def test_a_stop_string_ends_the_rest_where_it_was_completed(num_final: int) -> None:
    table, answer = opened(submit("r"))
    table.take(delta("r", 10, 11, 12, 13, 14), 0.0)
    assert table.finish("r", num_final) == "r"
    table.lose(1.0)
    (rest,) = table.rest_of(answer)
    assert rest.output_token_ids is not None
    assert rest.output_token_ids.tolist() == [10, 11, 12, 13, 14][:num_final]
    assert rest.sampling.max_tokens == num_final
    assert rest.sampling.min_tokens <= num_final


def test_a_stop_string_is_told_under_the_id_that_an_engine_knows() -> None:
    table, answer = opened(submit("r"))
    table.take(delta("r", 10, 11), 0.0)
    table.lose(1.0)
    assert table.finish("r", 1) is None
    (rest,) = table.rest_of(answer)
    assert table.finish("r", 2) == rest.request_id


def test_ids_of_a_lost_engine_are_stale_once_also_those_that_were_left() -> None:
    table, answer = opened(submit("a"), submit("b"))
    other = OpenAnswer([submit("c")])
    table.open(other)
    table.take(delta("b", 10, completion=DONE), 0.0)
    table.lose(1.0)
    assert table.close(answer) == []
    assert table.take_stale_ids() == ["a", "c"]
    assert table.take_stale_ids() == []
    assert table.waiting() == [other]


def test_a_consumer_that_leaves_has_aborted_what_an_engine_may_compute() -> None:
    table, answer = opened(submit("a"), submit("b"))
    table.take(delta("a", 10, completion=DONE), 0.0)
    table.lose(1.0)
    (rest,) = table.rest_of(answer)
    assert table.close(answer) == [rest.request_id]
    assert len(table) == 0
    assert (table._at_engine, table._requests) == ({}, {})


def test_patience_counts_from_the_loss_until_an_engine_goes_on() -> None:
    table, answer = opened(submit("r"))
    table.lose(1.0)
    table.rest_of(answer)
    table.lose(5.0)
    table.expire(10.9)
    assert table.num_held == 1
    table.expire(11.0)
    (error,) = read(answer)
    assert isinstance(error, DeadlineError)
    assert "within 10 s (--recovery-limit)" in str(error)
    assert (table.num_held, table.waiting()) == (0, [])


@pytest.mark.parametrize("sign", ["served", "told"])
def test_patience_is_whole_again_once_an_engine_went_on(sign: str) -> None:
    table, answer = opened(submit("r"))
    table.lose(1.0)
    (rest,) = table.rest_of(answer)
    if sign == "served":
        table.serve()
    else:
        table.take(delta(rest.request_id, 10), 2.0)
    table.expire(1000.0)
    assert not answer.has_failed
    table.lose(1000.0)
    table.expire(1009.0)
    assert table.waiting() == [answer]


def test_an_engine_that_serves_says_nothing_for_what_it_was_not_given() -> None:
    table, answer = opened(submit("r"))
    table.lose(1.0)
    table.serve()
    table.expire(11.0)
    assert answer.has_failed


def test_the_third_engine_that_dies_with_it_takes_an_answer_along() -> None:
    table, answer = opened(submit("r"))
    for number in range(2):
        table.lose(float(number))
        table.lose(float(number))
        table.rest_of(answer)
    table.lose(3.0)
    (error,) = read(answer)
    assert "3 engines were lost" in str(error)
    assert table.waiting() == []


@pytest.mark.parametrize("kind", ["unavailable", "overloaded", "invalid"])
def test_refusals_that_pass_are_waited_out_once_an_engine_was_lost(kind: str) -> None:
    table, answer = opened(submit("r"))
    table.lose(1.0)
    (rest,) = table.rest_of(answer)
    refused = Refused(rest.request_id, kind, "why", None)
    table.take(refused, 2.0)
    passes = kind != "invalid"
    assert (table.waiting() == [answer]) == passes
    assert read(answer) == ([] if passes else [refused])
    assert table.close(answer) == []


@pytest.mark.parametrize("is_held", [False, True])
def test_a_slow_reader_gets_its_error_and_is_not_asked_for_again(is_held: bool) -> None:
    table, answer = opened(submit("r"))
    if is_held:
        table.lose(0.0)
    for number in range(MAX_UNREAD_DELTAS + 2):
        table.take(delta("r", number), 0.0)
    (error,) = read(answer)
    assert isinstance(error, CellError)
    assert "4096 deltas wait" in str(error)
    table.lose(1.0)
    assert table.waiting() == []
    assert table.take_stale_ids() == ["r"]


def test_seeds_are_drawn_once_for_all_choices_of_a_prompt() -> None:
    def asked(name: str, seed: int | None = None, leader_id: str | None = None) -> Submit:
        sampling = SamplingParams(8, 1.0, 1.0, seed, ())
        return Submit(name, np.zeros(1, np.int32), sampling, None, False, leader_id=leader_id)

    drawn = iter((50, 51, 52))
    seeded = with_seeds(
        [asked("a"), asked("b", None, "a"), asked("c", 3), asked("d", 3, "c"), asked("e")],
        lambda: next(drawn),
    )
    assert [submit.sampling.seed for submit in seeded] == [50, 50, 3, 3, 51]
