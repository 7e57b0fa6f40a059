"""What plans change where a pass over kept KV needs hidden states: one row of `bench prefix` against another."""

from collections.abc import Mapping, Sequence
from typing import Any

BEFORE, AFTER = "kv_gate", "kv_replay_planned"


def changes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Relative changes of medians from BEFORE to AFTER; −1 is all gone. An exchange that took no time changed by 0."""
    by_name = {row["row"]: row for row in rows}
    before, after = by_name[BEFORE], by_name[AFTER]
    return {
        "gate": _change(before["gate_seconds"], after["gate_seconds"]),
        "exchange": _change(_exchange(before), _exchange(after)),
        "messages": _change(before["messages"], after["messages"]),
        "bytes": _change(before["bytes"], after["bytes"]),
        "time to first token": _change(before["ttft_seconds_p50"], after["ttft_seconds_p50"]),
        "tokens per second of the request": _change(
            before["request_tokens_per_second"], after["request_tokens_per_second"]
        ),
    }


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    told = ", ".join(f"{what} {change:+.0%}" for what, change in changes(rows).items())
    return f"{AFTER} over {BEFORE}: {told}"


def _exchange(row: Mapping[str, Any]) -> float:
    return float(row["dispatch_seconds"]) + float(row["combine_seconds"])


def _change(before: float, after: float) -> float:
    return after / before - 1 if before else 0.0
