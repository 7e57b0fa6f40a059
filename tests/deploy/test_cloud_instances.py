"""Whether instances of a cluster are there is asked of the cloud before `ray up` and after `ray down`; that it does not
answer is not taken for an answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.errors import CellError
from deploy.cloud_instances import Instances, instances_in, main
from deploy.cluster_down import check_all_ended
from deploy.cluster_up import check_before_ray_up
from deploy.remote import Answer
from tests.deploy.listed_provider import ListedProvider
from tests.deploy.test_up_and_down import CLOUD

HEAD_AND_WORKERS = {"head": ["i-1"], "worker": ["i-2", "i-3"]}
ALL = Instances(("i-1",), ("i-2", "i-3"))


def cluster_file(tmp_path: Path, **provider: Any) -> str:
    """Of a provider that is a class of these tests."""
    module = f"{ListedProvider.__module__}.{ListedProvider.__name__}"
    tree = {
        "cluster_name": "trial",
        "provider": {"type": "external", "module": module, **provider},
    }
    file = tmp_path / "cloud.yaml"
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def test_heads_and_workers_are_told_apart_on_the_way_from_the_process_that_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(cluster_file(tmp_path, listed=HEAD_AND_WORKERS)) == 0
    said = Answer(0, f"a line of a library\n{capsys.readouterr().out}", "a warning")
    assert instances_in(CLOUD, said) == ALL


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(1, "", "NoCredentialsError: Unable to locate credentials\n"), "NoCredentialsError"),
        (Answer(1, "Failed to fetch instances\n", ""), "Failed to fetch instances"),
        (Answer(None, "", ""), "no answer in time"),
        (Answer(0, "", "odd"), "odd"),
    ],
)
def test_a_cloud_that_does_not_answer_is_told_and_is_not_an_empty_list(
    answer: Answer, reason: str
) -> None:
    with pytest.raises(CellError) as told:
        instances_in(CLOUD, answer)
    assert str(told.value).startswith(
        "the aws provider does not tell which instances cluster trial has: "
    )
    assert reason in str(told.value)


def test_a_library_that_raises_is_one_line_and_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(cluster_file(tmp_path, refusal="token expired\nmore")) == 1
    assert capsys.readouterr() == ("", "PermissionError: token expired\n")


def test_instances_that_are_left_after_ray_down_are_named() -> None:
    check_all_ended(Instances((), ()))
    with pytest.raises(CellError, match=r"^still there after ray down: worker i-2;"):
        check_all_ended(Instances((), ("i-2",)))
    assert str(ALL) == "head i-1, worker i-2, worker i-3"


def test_nothing_is_brought_up_where_the_cloud_cannot_be_asked(tmp_path: Path) -> None:
    file = replace(CLOUD, path=Path(cluster_file(tmp_path, refusal="token expired")))
    with pytest.raises(CellError, match=r"cluster trial has: PermissionError: token expired$"):
        check_before_ray_up(file)
