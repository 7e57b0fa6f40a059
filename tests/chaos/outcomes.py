"""What came of disturbances, judged and tabled. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.chaos.streams import Stream

_RECOVERED = re.compile(r"recovered generation=\d+ seconds=([\d.]+) ")
_TOKENS = re.compile(r" requests=\d+ routed_tokens=(\d+) unrouted_tokens=(\d+)")
"""Of requests that lost their rank, or that another engine took up again."""
COLUMNS = (
    *("what", "times", "open", "to their end", "cut off", "wrong"),
    *("recovery p50, s", "max, s", "pause p50, s", "max, s", "replayed"),
)
LEGEND = (
    "*Open*: the share of streams that were when it came. *To their end*: streams with every token and `[DONE]`. "
    "*Recovery*: from the break that the engine found to the next step. *Pause*: the longest time after the "
    "disturbance in which no stream at all got a token, so with what it took to find the break. *Replayed*: of the "
    "known tokens of requests that lost their KV, those that had their routes."
)


@dataclass(frozen=True)
class Outcome:
    """Of one disturbance. seconds: of each recovery that it took; num_routed, num_unrouted: tokens of requests that
    were placed anew."""

    name: str
    num_open: int
    num_whole: int
    num_cut: int
    num_wrong: int
    pause_seconds: float
    seconds: tuple[float, ...]
    num_routed: int
    num_unrouted: int

    @property
    def num_streams(self) -> int:
        return self.num_whole + self.num_cut


def wrong_streams(
    ends: Sequence[Stream], undisturbed: Sequence[Stream], *, may_be_cut: bool
) -> list[Stream]:
    """may_be_cut: a stream may be the beginning of what it should be."""
    return [
        end
        for end, expected in zip(ends, undisturbed, strict=True)
        if not _is_right(end, expected, may_be_cut)
    ]


def _is_right(end: Stream, expected: Stream, may_be_cut: bool) -> bool:
    if end.is_whole:
        return end.token_ids == expected.token_ids
    return may_be_cut and end.token_ids == expected.token_ids[: len(end.token_ids)]


def recoveries(log: str) -> tuple[tuple[float, ...], int, int]:
    """Seconds of each, and the tokens with and without routes of all of them."""
    tokens = _TOKENS.findall(log)
    return (
        tuple(float(seconds) for seconds in _RECOVERED.findall(log)),
        sum(int(routed) for routed, _ in tokens),
        sum(int(unrouted) for _, unrouted in tokens),
    )


def table(outcomes: Sequence[Outcome]) -> list[str]:
    names = dict.fromkeys(outcome.name for outcome in outcomes)
    rows = [_row(name, [o for o in outcomes if o.name == name]) for name in names]
    head = f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"
    return [*head, *rows, _row("**all**", outcomes), "", LEGEND]


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    streams = sum(outcome.num_streams for outcome in outcomes)
    whole = sum(outcome.num_whole for outcome in outcomes)
    routed = sum(outcome.num_routed for outcome in outcomes)
    known = routed + sum(outcome.num_unrouted for outcome in outcomes)
    cells = [
        name,
        str(len(outcomes)),
        f"{sum(outcome.num_open for outcome in outcomes) / streams:.0%}",
        f"{whole} of {streams}",
        str(sum(outcome.num_cut for outcome in outcomes)),
        str(sum(outcome.num_wrong for outcome in outcomes)),
        *_spread([s for outcome in outcomes for s in outcome.seconds]),
        *_spread([outcome.pause_seconds for outcome in outcomes]),
        f"{routed / known:.1%}" if known else "",
    ]
    return f"| {' | '.join(cells)} |"


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")
