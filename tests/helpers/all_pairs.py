"""A small set of runs in which every pair of values of two factors occurs: greedy and deterministic."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def all_pairs(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows in which every allowed pair occurs. `allowed` judges rows in which factors may still be missing, and a row
    that it takes must be one that can be completed."""
    uncovered = dict.fromkeys(pairs(factors, allowed))  # an ordered set
    rows: list[Row] = []
    while uncovered:
        row = _complete(dict(next(iter(uncovered))), factors, allowed, uncovered, rows)
        for pair in combinations(row.items(), 2):
            uncovered.pop(pair, None)
        rows.append(row)
    return rows


def pairs(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Pair]:
    """All that have to occur, factors in their order."""
    return [
        ((first, a), (second, b))
        for first, second in combinations(factors, 2)
        for a, b in product(factors[first], factors[second])
        if allowed({first: a, second: b})
    ]


def _complete(
    row: Row,
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    uncovered: Mapping[Pair, None],
    rows: Sequence[Row],
) -> Row:
    """The other factors one by one, each with the value that adds most uncovered pairs; of equals the rarest so far."""
    place = {name: index for index, name in enumerate(factors)}

    def gain(name: str, value: Any) -> int:
        return sum(
            tuple(sorted(((name, value), item), key=lambda pair: place[pair[0]])) in uncovered
            for item in row.items()
        )

    for name in factors:
        if name not in row:
            values = [value for value in factors[name] if allowed({**row, name: value})]
            used = Counter(earlier[name] for earlier in rows)
            row[name] = max(values, key=lambda value: (gain(name, value), -used[value]))
    return {name: row[name] for name in factors}
