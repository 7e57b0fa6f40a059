"""What came of disturbances, judged and tabled. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from tests.chaos.recoveries import Recoveries
from tests.chaos.streams import Address, Stream, longest_pause

ENOUGH = 0.95
"""Of all streams have to go on to their end."""
MAX_TRIES = 5
"""Of a disturbance that misses its moment."""
COLUMNS = (
    *("what", "times", "open", "to their end", "cut off", "wrong"),
    *("recovery p50, s", "max, s", "pause p50, s", "max, s", "replayed"),
)
LEGEND = (
    "*Open*: the share of streams that were when it came. *To their end*: streams with every token and `[DONE]`. "
    "*Cut off*: all others. *Wrong*: with a token that is not that of the undisturbed run, or cut off although the "
    "connection was not one of a killed HTTP server's, or with anything but one error at the end. "
    "*Recovery*: from the break that the engine found to the next step. *Pause*: the longest time after the "
    "disturbance in which no stream at all got a token, so with what it took to find the break. *Replayed*: of the "
    "known tokens of requests that lost their KV or their engine, those that had their routes."
)


class Aim(Enum):
    """Whether a disturbance came when it should; the value is what its row adds."""

    HIT = ""
    MISSED = " (missed its moment, drawn again)"
    GIVEN_UP = f" (missed its moment for the {MAX_TRIES}th time, given up)"


@dataclass(frozen=True)
class Observed:
    """Of one disturbance. num_open: streams when it came, at `at` of the monotonic clock; lost_clients: of the HTTP
    servers that it killed."""

    name: str
    streams: Sequence[Stream]
    num_open: int
    at: float
    recoveries: Recoveries
    num_groups: int
    """That the ranks meet in before they go on, at least, if it came when it should."""
    num_starts: int = 0
    """How often ranks are started in place of others before they go on, likewise."""
    lost_clients: Collection[Address] = ()


@dataclass(frozen=True)
class Outcome:
    """Of one disturbance. seconds: of each recovery that it took; num_routed, num_unrouted: tokens of requests that
    were placed anew."""

    name: str
    num_open: int
    num_whole: int
    num_cut: int
    wrong: tuple[Stream, ...]
    pause_seconds: float
    seconds: tuple[float, ...]
    num_routed: int
    num_unrouted: int
    aim: Aim = Aim.HIT

    @property
    def num_streams(self) -> int:
        return self.num_whole + self.num_cut


def outcome_of(seen: Observed, undisturbed: Sequence[Stream]) -> Outcome:
    """undisturbed: the same streams, in the same order."""
    told = seen.recoveries
    has_hit = told.took_groups(seen.num_groups) and told.took_starts(seen.num_starts)
    return Outcome(
        seen.name,
        num_open=seen.num_open,
        num_whole=sum(stream.is_whole for stream in seen.streams),
        num_cut=sum(not stream.is_whole for stream in seen.streams),
        wrong=wrong_streams(seen.streams, undisturbed, seen.lost_clients),
        pause_seconds=longest_pause(seen.streams, seen.at),
        seconds=seen.recoveries.seconds,
        num_routed=seen.recoveries.num_routed,
        num_unrouted=seen.recoveries.num_unrouted,
        aim=Aim.HIT if has_hit else Aim.MISSED,
    )


def wrong_streams(
    ends: Sequence[Stream], undisturbed: Sequence[Stream], lost_clients: Collection[Address]
) -> tuple[Stream, ...]:
    """lost_clients: of a killed HTTP server; their streams, and no others, may be cut off."""
    return tuple(
        end
        for end, expected in zip(ends, undisturbed, strict=True)
        if not _is_right(end, expected, lost_clients)
    )


def _is_right(end: Stream, expected: Stream, lost_clients: Collection[Address]) -> bool:
    if end.is_whole:
        return end.token_ids == expected.token_ids
    is_beginning = end.token_ids == expected.token_ids[: len(end.token_ids)]
    return end.client in lost_clients and len(end.errors) == 1 and is_beginning


def is_good(outcomes: Sequence[Outcome]) -> bool:
    """No stream was wrong, and enough went on to their end; also where the moment was missed."""
    num_streams = sum(outcome.num_streams for outcome in outcomes)
    enough = sum(outcome.num_whole for outcome in outcomes) >= ENOUGH * num_streams
    return enough and not any(outcome.wrong for outcome in outcomes)


def num_hits(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.aim is Aim.HIT for outcome in outcomes)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Those that missed their moment stand below the sum."""
    hits = [outcome for outcome in outcomes if outcome.aim is Aim.HIT]
    others = [outcome for outcome in outcomes if outcome.aim is not Aim.HIT]
    head = f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"
    return [*head, *_rows(hits), _row("**all**", hits), *_rows(others), "", LEGEND]


def _rows(outcomes: Sequence[Outcome]) -> list[str]:
    kinds = dict.fromkeys((outcome.name, outcome.aim) for outcome in outcomes)
    return [
        _row(f"{name}{aim.value}", [o for o in outcomes if (o.name, o.aim) == (name, aim)])
        for name, aim in kinds
    ]


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    streams = sum(outcome.num_streams for outcome in outcomes)
    whole = sum(outcome.num_whole for outcome in outcomes)
    routed = sum(outcome.num_routed for outcome in outcomes)
    known = routed + sum(outcome.num_unrouted for outcome in outcomes)
    cells = [
        name,
        str(len(outcomes)),
        _share(sum(outcome.num_open for outcome in outcomes), streams, 0),
        f"{whole} of {streams}",
        str(sum(outcome.num_cut for outcome in outcomes)),
        str(sum(len(outcome.wrong) for outcome in outcomes)),
        *_spread([s for outcome in outcomes for s in outcome.seconds]),
        *_spread([outcome.pause_seconds for outcome in outcomes]),
        _share(routed, known, 1),
    ]
    return f"| {' | '.join(cells)} |"


def _share(part: int, whole: int, digits: int) -> str:
    return f"{part / whole:.{digits}%}" if whole else ""


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")
