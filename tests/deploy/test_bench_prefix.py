"""`pointsman bench prefix` at sizes of a few seconds, on a random checkpoint."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config import load_config
from cluster.errors import CellError
from cluster.messages import Completion
from cluster.scores import ScoreColumns
from cluster.worker_messages import SentTraffic, StepResult, StepTimings
from deploy.bench import chart
from deploy.bench.comparison import changes
from deploy.bench.local_cell import Generation, WatchedStep
from deploy.bench.prefix import PrefixSizes, Sample, check_equal, row_of, run, run_order
from deploy.cli import main
from router_service.step_observer import StepTimeline
from tests.deploy.test_chart import png_size
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint

ROWS = [
    "cold",
    "evicted_negotiated",
    "replay_negotiated",
    "replay_planned_first",
    "replay_planned",
    "kv_hit",
    "kv_gate",
    "kv_replay_planned",
    "kv_copy",
]
SECONDS = [
    f"{part}_seconds"
    for part in ("attention", "gate", "dispatch", "experts", "combine", "control", "copy")
]
PREFIX_TOKENS = 256
TAIL_TOKENS = 20
SIZES = ("--prefix-tokens", "256", "--tail-tokens", "20", "--output-tokens", "3", "--repeats", "1")


@pytest.fixture(scope="module", params=[1, 2])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name."""
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=1)
    config = load_config(
        None,
        {
            "model.dir": str(model),
            "cell.ep_size": request.param,
            "scheduler.plan_wait_seconds": 30.0,
        },
    )
    sizes = PrefixSizes(PREFIX_TOKENS, TAIL_TOKENS, output_tokens=3, repeats=2)
    return {row["row"]: row for row in run(config, sizes)}


def test_all_states_of_a_prefix_have_a_row(rows: Any) -> None:
    assert list(rows) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_a_row_tells_where_the_time_went(rows: Any, row: str) -> None:
    assert all(rows[row][field] >= 0 for field in SECONDS)
    assert 0 < rows[row]["ttft_seconds_min"] <= rows[row]["ttft_seconds_p50"]
    assert rows[row]["ttft_seconds_p50"] <= rows[row]["ttft_seconds_p99"]
    assert rows[row]["attention_seconds"] > 0
    assert rows[row]["tokens_per_second"] > 0
    assert rows[row]["request_tokens_per_second"] > 0
    assert rows[row]["output_tokens_per_second"] > 0
    assert rows[row]["repeats"] == 2


@pytest.mark.parametrize("row", ["cold", "evicted_negotiated"])
def test_without_replay_every_token_meets_the_gate(rows: Any, row: str) -> None:
    assert rows[row]["cached_tokens"] == 0
    assert rows[row]["replayed_tokens"] == 0
    assert rows[row]["gate_tokens"] == PREFIX_TOKENS + TAIL_TOKENS


@pytest.mark.parametrize(
    "row", ["replay_negotiated", "replay_planned_first", "replay_planned", "kv_replay_planned"]
)
def test_with_replay_the_tail_alone_meets_the_gate(rows: Any, row: str) -> None:
    assert rows[row]["gate_tokens"] == TAIL_TOKENS


def test_negotiated_replay_has_no_planned_token(rows: Any) -> None:
    assert rows["replay_negotiated"]["replayed_tokens"] == PREFIX_TOKENS
    assert rows["replay_negotiated"]["planned_tokens"] == 0


@pytest.mark.parametrize("row", ["replay_planned_first", "replay_planned"])
def test_nearly_all_replayed_tokens_of_a_planned_row_travel_by_plans(rows: Any, row: str) -> None:
    assert rows[row]["replayed_tokens"] == PREFIX_TOKENS
    assert rows[row]["planned_tokens"] >= 0.95 * PREFIX_TOKENS


def test_only_the_first_planned_replay_compiles(rows: Any) -> None:
    assert rows["replay_planned_first"]["compiled_fragments"] > 0
    assert rows["replay_planned"]["compiled_fragments"] == 0


@pytest.mark.parametrize("row", ["kv_hit", "kv_copy"])
def test_kept_kv_leaves_the_tail_to_compute(rows: Any, row: str) -> None:
    assert rows[row]["cached_tokens"] == PREFIX_TOKENS
    assert rows[row]["replayed_tokens"] == 0
    assert rows[row]["gate_tokens"] == TAIL_TOKENS


@pytest.mark.parametrize("row", ["kv_gate", "kv_replay_planned"])
def test_a_pass_that_needs_hidden_states_takes_nothing_from_the_cache(rows: Any, row: str) -> None:
    assert rows[row]["cached_tokens"] == 0
    planned = row == "kv_replay_planned"
    assert rows[row]["replayed_tokens"] == PREFIX_TOKENS * planned
    assert rows[row]["gate_tokens"] == TAIL_TOKENS + PREFIX_TOKENS * (not planned)
    assert rows[row]["planned_tokens"] >= 0.95 * PREFIX_TOKENS * planned
    assert rows[row]["compiled_fragments"] == 0


def test_changes_are_relative_to_the_row_that_meets_the_gate() -> None:
    fields = {"gate_seconds": 2.0, "dispatch_seconds": 3.0, "combine_seconds": 1.0, "messages": 10}
    fields |= {"bytes": 100, "ttft_seconds_p50": 8.0, "request_tokens_per_second": 50.0}
    after = {"gate_seconds": 0.0, "dispatch_seconds": 1.0, "combine_seconds": 1.0, "messages": 9}
    after |= {"bytes": 100, "ttft_seconds_p50": 4.0, "request_tokens_per_second": 75.0}
    rows = [{"row": "kv_replay_planned", **after}, {"row": "kv_gate", **fields}]
    assert changes(rows) == {
        "gate": -1.0,
        "exchange": -0.5,
        "messages": pytest.approx(-0.1),
        "bytes": 0.0,
        "time to first token": -0.5,
        "tokens per second of the request": 0.5,
    }


def test_a_copy_is_a_hit_after_the_copy(rows: Any) -> None:
    assert rows["kv_copy"]["ttft_seconds_p50"] >= rows["kv_hit"]["ttft_seconds_p50"]
    assert rows["kv_copy"]["experts_seconds"] == rows["kv_hit"]["experts_seconds"]


@pytest.mark.parametrize("row", ROWS)
def test_only_ranks_that_have_others_send(rows: Any, row: str) -> None:
    alone = rows[row]["ep_size"] == 1
    assert (rows[row]["messages"] == 0) == alone
    assert (rows[row]["bytes"] == 0) == alone


@pytest.mark.parametrize("rows", [2], indirect=True)
def test_plans_save_messages_and_bytes(rows: Any) -> None:
    """Of the same steps."""
    assert rows["replay_planned"]["prefill_steps"] == rows["replay_negotiated"]["prefill_steps"]
    for field in ("messages", "bytes"):
        assert rows["replay_planned"][field] < rows["replay_negotiated"][field]


def test_numbers_of_a_row_are_medians_over_repeats_of_sums_over_steps_and_ranks() -> None:
    samples = [
        Sample(make_generation([5, 6], prefill=[make_step(n), make_step(1)])) for n in (7, 2, 3)
    ]
    row = row_of("cold", samples, ep_size=2, num_prompt_tokens=10)
    assert row["messages"] == 2 * 3 + 2 * 1
    assert row["bytes"] == 2 * 300 + 2 * 100
    assert row["gate_tokens"] == 2 * 5 * (7 + 1), "of the repeat with the most"
    assert row["gate_seconds"] == 3 + 1
    assert row["prefill_steps"] == 2


@pytest.mark.parametrize(
    ("seconds", "p50", "p99"),
    [
        ([4.0], 4.0, 4.0),
        ([3.0, 9.0, 1.0], 3.0, 9.0),
        ([float(n) for n in range(1, 101)], 50.5, 100.0),
        ([float(n) for n in range(1, 202)], 101.0, 199.0),
    ],
    ids=["one", "three", "a hundred", "two hundred and one"],
)
def test_percentiles_are_of_the_time_to_the_first_token(
    seconds: list[float], p50: float, p99: float
) -> None:
    samples = [Sample(make_generation([5, 6], first_token=second)) for second in seconds]
    row = row_of("cold", samples, ep_size=2, num_prompt_tokens=10)
    assert row["ttft_seconds_min"] == min(seconds)
    assert (row["ttft_seconds_p50"], row["ttft_seconds_p99"]) == (p50, p99)
    assert row["tokens_per_second"] == round(10 / p50, 1)


def test_tokens_per_second_of_a_request_are_all_its_tokens_by_the_time_of_the_last_one() -> None:
    """Three output tokens, the last one two seconds after the first."""
    samples = [Sample(make_generation([5, 6, 7], first_token=second)) for second in (3.0, 9.0, 2.0)]
    row = row_of("cold", samples, ep_size=2, num_prompt_tokens=17)
    assert row["request_tokens_per_second"] == (17 + 3) / (3.0 + 2)
    assert row["tokens_per_second"] == round(17 / 3.0, 1)


def test_the_copy_of_kv_is_part_of_the_request() -> None:
    sample = Sample(make_generation([5, 6], first_token=1.0), copy_seconds=2.0)
    row = row_of("kv_copy", [sample], ep_size=2, num_prompt_tokens=10)
    assert row["request_tokens_per_second"] == (10 + 2) / (2.0 + 1.0 + 1)


def test_over_repeats_every_row_comes_early_and_late_as_the_seed_says() -> None:
    random, again = np.random.default_rng(1), np.random.default_rng(1)
    orders = [run_order(random) for _ in range(200)]
    assert all(sorted(order) == sorted(ROWS[:-1]) for order in orders)
    assert {order[0] for order in orders} == set(ROWS[:-1])
    assert {order[-1] for order in orders} == set(ROWS[:-1])
    assert [run_order(again) for _ in range(200)] == orders


def test_rows_that_disagree_in_their_output_are_not_reported() -> None:
    samples = {
        "cold": Sample(make_generation([5, 6, 7])),
        "kv_hit": Sample(make_generation([5, 9, 7])),
    }
    with pytest.raises(CellError, match=r"row kv_hit .* position 1"):
        check_equal(samples)


def test_the_command_prints_a_table_writes_json_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = write_tiny_checkpoint(tmp_path / "model", seed=1), tmp_path / "prefix.json"
    picture = tmp_path / "prefix.png"
    arguments = ["--model", str(model), "--ep-size", "1", "--deterministic", "--json", str(file)]
    assert main(["bench", "prefix", *SIZES, *arguments, "--png", str(picture)]) == 0
    report = json.loads(file.read_text())
    assert set(report) == {"machine", "command", "rows"}
    assert [row["row"] for row in report["rows"]] == ROWS
    output = capsys.readouterr().out
    assert "| replay_planned |" in output
    assert "kv_replay_planned over kv_gate: gate " in output
    assert png_size(picture) == (chart.WIDTH_PIXELS, chart.height_pixels(len(ROWS)))


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--prefix-tokens", "15", "--prefix-tokens 15 is too small"),
        ("--prefix-tokens", "4096", "exceed the context of 4096"),
        ("--tail-tokens", "0", "--tail-tokens 0 is too small"),
        ("--output-tokens", "1", "--output-tokens 1 is too small"),
        ("--repeats", "0", "--repeats 0 is too small"),
        ("--png", "/nowhere/prefix.png", "--png /nowhere/prefix.png: No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, told: str
) -> None:
    assert main(["bench", "prefix", flag, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
from deploy.cli import main
sys.exit(main(["bench", "prefix", "--png", sys.argv[1]]))
"""


def test_a_picture_without_matplotlib_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "prefix.png"
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, str(file)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert f"--png {file} needs matplotlib" in line
    assert not file.exists()


def make_generation(
    token_ids: list[int], *, first_token: float = 0.1, prefill: Sequence[WatchedStep] = ()
) -> Generation:
    """A token per second after the first."""
    completion = Completion("length", None, len(token_ids), 0, 0)
    seconds = [first_token + number for number in range(len(token_ids))]
    return Generation(token_ids, seconds, prefill, completion, 0)


def make_step(number: int) -> WatchedStep:
    """Rank 0 sends nothing, rank 1 twice the number of messages, of 100 bytes each; the gate took `number` seconds, on
    each rank for five times as many tokens."""
    timings = StepTimings(0.0, 0.0, float(number), 0.0, 0.0, 0.0)
    results = [
        StepResult(
            rank=rank,
            step_id=0,
            seq_ids=[],
            token_ids=[],
            poisoned_seq_ids=[],
            gate_tokens=5 * number,
            expert_load=np.zeros((1, 1), np.int32),
            sent=SentTraffic(2 * number * rank, 200 * number * rank),
            scores=ScoreColumns.empty(),
            timings=timings,
        )
        for rank in range(2)
    ]
    return WatchedStep(1, 1, 0, 0, frozenset({0}), StepTimeline(0.0, 0.0, 0.0, 0.0), results)
