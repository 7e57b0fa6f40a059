"""What an actor that is not there died of, from Ray's exceptions, in one line. No Ray is started."""

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from cluster.errors import CheckpointError, DeadlineError
from deploy.actor_calls import START_LIMIT, failure_of, reason_of
from deploy.joined_ray import PROBE_LIMIT

TRACEBACK = """\
ray::HttpServer.__init__() (pid=7, ip=192.0.2.2, actor_id=8e6f, repr=<HttpServer object>)
           ^^^^^^^^^^^^^^^^^^^^
  File "http_server.py", line 8, in __init__
    raise CheckpointError(message)
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""


def constructor_raised(last_lines: str) -> RayActorError:
    cause = RayTaskError("__init__", TRACEBACK + last_lines, CheckpointError("x"))
    return ActorDiedError.from_task_error(cause)


@pytest.mark.parametrize(
    ("last_lines", "reason"),
    [
        (
            "cluster.errors.CheckpointError: /m/tokenizer.json: not read: at line: 1",
            "/m/tokenizer.json: not read: at line: 1",
        ),
        ("router_service.openai_errors.ApiKeyError: no key", "no key"),
        ("KeyError: 'name'", "KeyError: 'name'"),
        ("RuntimeError: first\nsecond: line", "RuntimeError: first"),
        ("zmq.error.ZMQError: Address in use", "zmq.error.ZMQError: Address in use"),
        ("ZeroDivisionError", "ZeroDivisionError"),
        (
            "OSError: inner\n\nThe above exception was the direct cause of the following exception:"
            f"\n\n{TRACEBACK}cluster.errors.ConfigError: outer",
            "outer",
        ),
    ],
)
def test_an_exception_of_a_constructor_is_told_with_its_own_message(
    last_lines: str, reason: str
) -> None:
    assert reason_of(constructor_raised(last_lines)) == reason


@pytest.mark.parametrize(
    "error", [ActorDiedError(), ActorUnavailableError("gone", None), RayActorError()]
)
def test_a_process_that_went_without_a_word_points_to_the_kernel(error: RayActorError) -> None:
    assert "its process died" in reason_of(error)


def test_a_process_that_ray_killed_for_its_memory_is_told_with_what_was_used() -> None:
    told = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, "
        "ID: b5a8) was 22.74GB used / 23.54GB limit (0.966)\nOOM kill reason: Memory usage"
    )
    reason = reason_of(OutOfMemoryError(told))
    assert reason.startswith("Ray killed its process because the host's memory ran low")
    assert reason.endswith(": 22.74GB used / 23.54GB limit")
    assert "Ray killed its process" in reason_of(OutOfMemoryError("said otherwise"))


def test_an_actor_that_went_with_its_host_points_to_the_host() -> None:
    context = ActorDiedErrorContext(
        error_message="The actor died because its node has died. Node Id: 66e938",
        class_name="ExpertWorker",
        actor_id=bytes(16),
    )
    assert reason_of(ActorDiedError(context)) == "its host does not answer any more"


@pytest.mark.parametrize(
    ("who", "limit", "line"),
    [
        ("rank 0", START_LIMIT, "rank 0 did not answer in time (cell.start_timeout_seconds)"),
        (
            "the probe",
            PROBE_LIMIT,
            "the probe did not answer in time (180 s, for all hosts at once)",
        ),
    ],
)
def test_an_answer_that_is_late_names_the_limit_that_it_exceeds(
    who: str, limit: str, line: str
) -> None:
    late = failure_of(GetTimeoutError(), who, limit)
    assert isinstance(late, DeadlineError)
    assert str(late) == line


def test_what_a_call_raised_there_is_told_with_who_it_was() -> None:
    raised = RayTaskError("load", TRACEBACK, CheckpointError("/m: no weights"))
    assert str(failure_of(raised, "rank 1", START_LIMIT)) == "rank 1: /m: no weights"
