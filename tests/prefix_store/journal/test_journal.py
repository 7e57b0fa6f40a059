"""What a journal does around its records: locks, evictions, other weights, a full disk, sizes, and who may read it."""

import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from prefix_store.journal.append_file import AppendFile
from prefix_store.journal.directory import StateDirectory
from prefix_store.journal.journal import SLICE_SECONDS
from prefix_store.journal.loading import find_kept
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    NAMESPACE,
    branch,
    finish,
    insert,
    route_block_bytes,
    tokens,
    write,
)
from tests.prefix_store.journal.kept import (
    SIZES,
    Clock,
    FullDisk,
    close,
    header,
    kept_file,
    limits,
    num_routes,
    on_disk,
    open_store,
    settle,
    state_of,
    wait_until,
)

FOUR = tokens(4 * BLOCK_SIZE)
OTHER = tokens(3 * BLOCK_SIZE, first=500)


# --- whose files


def test_a_directory_is_its_owners_alone(tmp_path: Path) -> None:
    kept_file(tmp_path / "state", FOUR)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    for file in (tmp_path / "state").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600


def test_two_cells_do_not_share_a_directory(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(
        ConfigError, match=f"--state-dir {tmp_path}: the cell of process {os.getpid()}"
    ):
        StateDirectory(tmp_path)
    close(store)
    StateDirectory(tmp_path).close()


def test_a_lock_is_not_passed_on_to_child_processes(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    directory.close()
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.communicate(b"\n")


def test_a_path_that_is_no_directory_is_refused_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=f"--state-dir {tmp_path}/file: "):
        StateDirectory(tmp_path / "file")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Whatever level the process logs from."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (header(fingerprint="other weights"), "model_fingerprint"),
        (header(numerics="deterministic, 4 ranks"), "numerics"),
        (header(block_size=2 * BLOCK_SIZE), "block_size"),
    ],
)
def test_files_of_something_else_are_set_aside_and_never_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: object, named: str
) -> None:
    file = kept_file(tmp_path, FOUR)
    directory = StateDirectory(tmp_path)
    for _ in range(2):
        assert not find_kept(directory, other, SIZES).index.names  # type: ignore[arg-type]
    directory.close()
    (line,) = warnings_of(caplog)
    assert f"state set aside file={file}" in line
    assert f"its {named} is" in line
    assert (tmp_path / "set-aside" / file.name).exists()


def test_a_file_that_is_damaged_at_its_start_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = kept_file(tmp_path, FOUR)
    content = bytearray(file.read_bytes())
    content[25] ^= 1
    file.write_bytes(content)
    assert on_disk(tmp_path) == {}
    assert "damaged at its start" in caplog.text


def test_a_torn_tail_is_cut_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = kept_file(tmp_path, FOUR)
    whole = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"\0" * 100)
    for _ in range(2):
        assert num_routes(tmp_path, FOUR) == len(FOUR)
    assert warnings_of(caplog) == [f"torn tail cut file={file} at={whole} bytes=100"]
    assert file.stat().st_size == whole


# --- evictions and other weights


@pytest.mark.parametrize("part", ["all", "routes"])
def test_what_is_evicted_by_command_is_gone_from_disk_when_that_is_told(
    tmp_path: Path, part: str
) -> None:
    store, answers = open_store(tmp_path), list[str]()
    insert(store, FOUR)
    wait_until(lambda: not state_of(store).waiting_bytes)
    assert FOUR[:BLOCK_SIZE].tobytes() in (tmp_path / "journal-1.state").read_bytes()
    store.evict(part)  # type: ignore[arg-type]
    store.when_settled(answers.append)
    while not answers:
        store.upkeep()
    assert answers == [""]
    assert not (tmp_path / "journal-1.state").exists()
    close(store)
    content = b"".join(file.read_bytes() for file in tmp_path.glob("*.*"))
    assert FOUR[:BLOCK_SIZE].tobytes() not in content
    assert on_disk(tmp_path) == {}


def test_what_a_request_holds_stays_on_disk_through_an_eviction(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    insert(store, OTHER)
    held = write(store, FOUR)
    store.evict("all")
    settle(store)
    finish(store, held)
    close(store)
    assert num_routes(tmp_path, FOUR) == len(FOUR)
    assert num_routes(tmp_path, OTHER) == 0


def test_an_eviction_of_kv_leaves_the_disk_alone(tmp_path: Path) -> None:
    store, answers = open_store(tmp_path), list[str]()
    insert(store, FOUR)
    store.evict("kv")
    store.when_settled(answers.append)
    assert answers == [""]
    close(store)
    assert num_routes(tmp_path, FOUR) == len(FOUR)


def test_routes_of_other_weights_are_of_another_state(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    insert(store, FOUR)
    store.exchange_weights("other weights")
    insert(store, OTHER)
    close(store)
    again = open_store(tmp_path, fingerprint="other weights")
    assert again.match(NAMESPACE, OTHER).num_route_tokens == len(OTHER)
    assert again.match(NAMESPACE, FOUR).num_route_tokens == 0
    close(again)
    assert on_disk(tmp_path) == {}


# --- disks


def test_a_stop_during_a_snapshot_leaves_the_files_before_it(tmp_path: Path) -> None:
    store = open_store(
        tmp_path,
        max_route_blocks=8,
        num_kv_blocks=8,
        writer=limits(max_bytes=3 * SIZES.stored_bytes(8, 0)),
        clock=Clock(tick=2 * SLICE_SECONDS),
    )
    for number in range(5):
        insert(store, tokens(4 * BLOCK_SIZE, first=100 * number))
    wait_until(lambda: not state_of(store).waiting_bytes)
    store.upkeep()  # one of two nodes
    wait_until(lambda: bool(list(tmp_path.glob("*.partial"))))
    close(store)
    assert sorted(file.name for file in tmp_path.glob("*.*")) == [
        "journal-1.state",
        "journal-2.state",
    ]
    assert len(on_disk(tmp_path)) == 5 * 4


def test_a_full_disk_is_told_and_made_good_by_a_snapshot_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock, disk = Clock(), FullDisk(2000)
    store = open_store(tmp_path, open_file=disk.open, clock=clock)
    insert(store, FOUR)
    settle(store)
    disk.room = 0
    insert(store, OTHER)
    wait_until(lambda: bool(state_of(store).error))
    insert(store, branch(2 * BLOCK_SIZE, 2 * BLOCK_SIZE))
    for _ in range(3):
        clock.now += 3600
        store.upkeep()
    wait_until(lambda: not state_of(store).waiting_bytes)
    state = state_of(store)
    assert state.error == "No space left on device"
    assert state.runs_dropped == 2
    assert store.match(NAMESPACE, OTHER).num_route_tokens == len(OTHER)

    disk.room = 10**6
    settle(store, clock)

    assert state_of(store).error == ""
    told = [line for line in caplog.messages if "not written" in line or "whole again" in line]
    assert len(told) == 2
    close(store)
    assert len(on_disk(tmp_path)) == 4 + 3 + 2


def test_what_was_on_disk_before_it_was_full_is_there_after_a_crash(tmp_path: Path) -> None:
    disk = FullDisk(2000)
    store = open_store(tmp_path, open_file=disk.open)
    insert(store, FOUR)
    settle(store)
    disk.room = 0
    insert(store, OTHER)
    wait_until(lambda: bool(state_of(store).error))
    close(store)
    assert num_routes(tmp_path, FOUR) == len(FOUR)


def test_a_disk_that_falls_behind_costs_records_until_the_next_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    store = open_store(tmp_path, writer=limits(max_waiting_bytes=200), clock=clock)
    insert(store, FOUR)
    insert(store, OTHER)
    assert state_of(store).runs_dropped == 2
    assert len([line for line in caplog.messages if "falls behind" in line]) == 1
    settle(store)
    close(store)
    assert len(on_disk(tmp_path)) == 4 + 3


def test_files_stay_within_their_size_however_much_is_published(tmp_path: Path) -> None:
    max_bytes = 3 * SIZES.stored_bytes(16, 0)
    clock = Clock(tick=0.5)
    store = open_store(
        tmp_path,
        max_route_blocks=16,
        num_kv_blocks=8,
        writer=limits(max_bytes=max_bytes),
        clock=clock,
    )
    sizes = []
    for number in range(120):
        insert(store, tokens(4 * BLOCK_SIZE, first=1000 * number))
        store.upkeep()
        wait_until(lambda: not state_of(store).waiting_bytes)
        sizes.append(state_of(store).num_bytes)
    settle(store)
    state = state_of(store)
    assert state.snapshots > 0
    assert max_bytes // 3 < max(sizes) <= max_bytes
    assert state.num_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.state"))
    last = tokens(4 * BLOCK_SIZE, first=1000 * 119)
    close(store)
    assert num_routes(tmp_path, last) == len(last)


def test_a_killed_process_leaves_what_it_had_handed_to_the_system(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.prefix_store.journal.kept import *\n"
        "from tests.prefix_store.builders import tokens\n"
        f"store = open_store(Path({str(tmp_path)!r}))\n"
        "for number in range(10**6):\n"
        "    insert(store, tokens(3 * BLOCK_SIZE, first=1000 * number))\n"
        "    store.upkeep()\n"
        "    if number == 100: print('going', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    wait_until(
        lambda: (
            sum(file.stat().st_size for file in tmp_path.glob("journal-*"))
            > 250 * route_block_bytes()
        )
    )
    process.send_signal(signal.SIGKILL)
    process.communicate()
    found = on_disk(tmp_path)
    assert len(found) > 100
    store = open_store(tmp_path)
    assert state_of(store).blocks_loaded == 64
    close(store)


# --- what is loaded


def test_of_more_than_fits_the_last_used_is_loaded_with_what_it_stands_on(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_route_blocks=1000, num_kv_blocks=64)
    insert(store, FOUR)
    for number in range(5):
        insert(store, tokens(2 * BLOCK_SIZE, first=1000 * (number + 1)))
    longer = branch(2 * BLOCK_SIZE, BLOCK_SIZE, first=9000)
    insert(store, longer)
    close(store)
    small = open_store(tmp_path, max_route_blocks=5, num_kv_blocks=4)
    assert small.match(NAMESPACE, longer).num_route_tokens == len(longer)
    assert (
        small.match(NAMESPACE, tokens(2 * BLOCK_SIZE, first=5000)).num_route_tokens
        == 2 * BLOCK_SIZE
    )
    assert small.match(NAMESPACE, FOUR).num_route_tokens == 2 * BLOCK_SIZE
    assert small.stats().route_bytes == 5 * route_block_bytes()
    small.check_invariants()
    close(small)


def test_what_is_loaded_gives_way_to_what_is_published(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_route_blocks=8, num_kv_blocks=4)
    insert(store, FOUR)
    close(store)
    again = open_store(tmp_path, max_route_blocks=8, num_kv_blocks=4)
    for number in range(3):
        insert(again, tokens(4 * BLOCK_SIZE, first=1000 * (number + 1)))
    again.check_invariants()
    assert again.match(NAMESPACE, FOUR).num_route_tokens == 0
    close(again)


def test_many_starts_do_not_leave_many_files(tmp_path: Path) -> None:
    for number in range(12):
        store = open_store(tmp_path)
        insert(store, tokens(2 * BLOCK_SIZE, first=100 * number))
        settle(store)
        close(store)
    assert len(list(tmp_path.glob("*.state"))) <= 12
    assert len(on_disk(tmp_path)) == 24


def test_what_a_disk_took_of_a_write_that_failed_is_cut_off_again(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    file.append(b"x" * 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append(b"y" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.append(b"z" * 10)
    assert file.size == 20
    file.close()
    assert (tmp_path / "file").read_bytes() == b"x" * 10 + b"z" * 10
