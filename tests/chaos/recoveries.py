"""What a cell's log tells of recoveries. Pure."""

import re
from dataclasses import dataclass

RANKS_MEET = "pointsman.recovery ranks meet"
"""A line of the launcher: it has told survivors and new processes where."""
RANKS_START = "pointsman.recovery ranks start again"
"""A line of the launcher: processes in place of those that are lost load their weights from now on."""
_MEET = re.compile(rf"{RANKS_MEET} generation=(\d+)", re.ASCII)
_RECOVERED = re.compile(r"recovered generation=(\d+) seconds=([\d.]+) ", re.ASCII)
_TOKENS = re.compile(r" requests=\d+ routed_tokens=(\d+) unrouted_tokens=(\d+)", re.ASCII)
"""Of requests that lost their rank, or that another engine took up again."""


@dataclass(frozen=True)
class Recoveries:
    """met: groups that ranks were told to meet in; recovered: those with which a step could run, by generation.
    num_starts: how often ranks were started in place of others; seconds: of each recovery; num_routed, num_unrouted:
    tokens of requests that were placed anew."""

    met: frozenset[int]
    recovered: frozenset[int]
    num_starts: int
    seconds: tuple[float, ...]
    num_routed: int
    num_unrouted: int

    @property
    def are_told(self) -> bool:
        """The last group's line has come, and it is the last one that is written."""
        return not self.met or max(self.met) in self.recovered

    def took_groups(self, number: int) -> bool:
        """So many at least, of which the last one alone came together: what broke the others broke them meanwhile."""
        return not number or (bool(self.recovered) and len(self.met - self.recovered) >= number - 1)

    def took_starts(self, number: int) -> bool:
        """So many at least before the ranks came together."""
        return not number or (
            bool(self.recovered) and self.num_starts - len(self.recovered) >= number - 1
        )


def recoveries(log: str) -> Recoveries:
    recovered, tokens = _RECOVERED.findall(log), _TOKENS.findall(log)
    return Recoveries(
        met=frozenset(map(int, _MEET.findall(log))),
        recovered=frozenset(int(generation) for generation, _ in recovered),
        num_starts=log.count(RANKS_START),
        seconds=tuple(float(seconds) for _, seconds in recovered),
        num_routed=sum(int(routed) for routed, _ in tokens),
        num_unrouted=sum(int(unrouted) for _, unrouted in tokens),
    )
