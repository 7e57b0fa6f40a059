"""Files of a cell that was here before another one was: they come back to their own, and none is lost on its way."""

from pathlib import Path

import pytest

from prefix_store.journal.directory import StateDirectory
from prefix_store.journal.loading import find_kept
from prefix_store.journal.records import file_start
from tests.prefix_store.builders import BLOCK_SIZE, insert, tokens
from tests.prefix_store.journal.kept import (
    SIZES,
    close,
    header,
    kept_file,
    num_routes,
    on_disk,
    open_store,
)

FOUR = tokens(4 * BLOCK_SIZE)
OTHER = tokens(3 * BLOCK_SIZE, first=500)
MISTAKEN = header(fingerprint="other weights")


def start_mistaken(path: Path) -> None:
    """With another model, which finds nothing of its own and leaves nothing."""
    directory = StateDirectory(path)
    assert not find_kept(directory, MISTAKEN, SIZES).index.names
    directory.close()


def test_what_was_set_aside_for_another_model_is_taken_back_by_its_own(tmp_path: Path) -> None:
    kept_file(tmp_path, FOUR)
    for _ in range(3):
        for _ in range(2):  # a mistaken start may be repeated
            start_mistaken(tmp_path)
        (tmp_path / "journal-79.state").write_bytes(file_start(MISTAKEN))
        assert num_routes(tmp_path, FOUR) == len(FOUR)
        assert [file.name for file in (tmp_path / "set-aside").iterdir()] == ["journal-79.state"]


def test_what_was_set_aside_is_taken_back_also_from_a_mistaken_start_that_left_nothing(
    tmp_path: Path,
) -> None:
    file = kept_file(tmp_path, FOUR)
    file.rename(tmp_path / "journal-50.state")
    start_mistaken(tmp_path)
    store = open_store(tmp_path)
    insert(store, OTHER)
    close(store)
    assert (num_routes(tmp_path, FOUR), num_routes(tmp_path, OTHER)) == (len(FOUR), len(OTHER))
    assert sorted(file.name for file in tmp_path.glob("*.state")) == [
        *("journal-50.state", "journal-51.state")
    ]


def test_files_are_numbered_from_those_that_lie_aside_so_that_no_two_meet_under_one_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "journal-50.state").write_bytes(file_start(MISTAKEN))
    close(open_store(tmp_path))
    (first,) = tmp_path.glob("*.state")
    first.unlink()  # as if that start had left nothing
    close(open_store(tmp_path))
    assert [file.name for file in tmp_path.glob("*.state")] == ["journal-51.state"]


@pytest.mark.parametrize(
    "places",
    [
        (".", "set-aside.going", "."),
        (".", "set-aside.going", "set-aside.going"),
        ("set-aside.going", "set-aside", "set-aside"),
        ("set-aside.going", "set-aside.returning", "set-aside.returning"),
        ("set-aside.going", ".", "set-aside.returning"),
        ("set-aside.going", ".", "."),
    ],
)
def test_a_start_that_ended_while_it_moved_files_has_lost_none(
    tmp_path: Path, places: tuple[str, str, str]
) -> None:
    """Of a file of another model and two of this one."""
    kept_file(tmp_path / "one", FOUR).rename(tmp_path / "journal-1.state")
    kept_file(tmp_path / "two", OTHER).rename(tmp_path / "journal-2.state")
    (tmp_path / "journal-3.state").write_bytes(file_start(MISTAKEN))
    for number, place in zip((3, 1, 2), places, strict=True):
        (tmp_path / place).mkdir(exist_ok=True)
        file = f"journal-{number}.state"
        (tmp_path / file).rename(tmp_path / place / file)

    assert (num_routes(tmp_path, FOUR), num_routes(tmp_path, OTHER)) == (len(FOUR), len(OTHER))
    assert not list(tmp_path.glob("set-aside.*"))
    assert [file.name for file in (tmp_path / "set-aside").iterdir()] == ["journal-3.state"]


def test_files_of_other_names_among_those_set_aside_are_left_there(tmp_path: Path) -> None:
    kept = kept_file(tmp_path, FOUR)
    start_mistaken(tmp_path)
    (tmp_path / "set-aside" / kept.name).rename(tmp_path / "set-aside" / "mine.state")
    assert on_disk(tmp_path) == {}
    assert (tmp_path / "set-aside" / "mine.state").exists()
    assert not (tmp_path / "mine.state").exists()
