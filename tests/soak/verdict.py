"""Which of many series grow: decided over plain numbers, so that a run of half an hour ends with names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_SAMPLES = 10
_TEN_MINUTES = 600.0
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """seconds: since the load began. values: by name of the series."""

    seconds: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Trend:
    """Slopes are per ten minutes: of the whole time, and of its halves. limit: of them; None where a series may go
    anywhere."""

    name: str
    slope: float
    halves: tuple[float, float]
    limit: float | None

    @property
    def grows(self) -> bool:
        """What rose once, by however much, did so in one half; noise rises in neither, and spikes not in the whole."""
        return self.limit is not None and min(self.slope, *self.halves) > self.limit


def trend_of(name: str, seconds: Floats, values: Floats, limit: float | None) -> Trend:
    """seconds, values: [n], n at least MIN_SAMPLES. Raises ValueError for fewer."""
    if len(values) < MIN_SAMPLES:
        raise ValueError(
            f"{name}: {len(values)} samples after the warm-up, {MIN_SAMPLES} are needed: run for longer"
        )
    middle = len(values) // 2
    halves = (
        least_squares_slope(seconds[:middle], values[:middle]),
        least_squares_slope(seconds[middle:], values[middle:]),
    )
    return Trend(name, theil_sen_slope(seconds, values), halves, limit)


def theil_sen_slope(seconds: Floats, values: Floats) -> float:
    """The median of the slopes between all pairs (Theil 1950, Sen 1968), per ten minutes: a few samples that lie
    anywhere do not move it."""
    first, second = np.triu_indices(len(values), 1)
    slopes = (values[second] - values[first]) / (seconds[second] - seconds[first])
    return float(np.median(slopes)) * _TEN_MINUTES


def least_squares_slope(seconds: Floats, values: Floats) -> float:
    """Per ten minutes. Sees what rises in a few large steps, where most pairs do not differ."""
    away = seconds - seconds.mean()
    return float(away @ values / (away @ away)) * _TEN_MINUTES


def trends(
    samples: Sequence[Sample], warm_up_seconds: float, limit_of: Callable[[str], float | None]
) -> list[Trend]:
    """Of every series that all samples after the warm-up have. limit_of: a series, by its name."""
    later = [sample for sample in samples if sample.seconds >= warm_up_seconds]
    seconds = np.array([sample.seconds for sample in later])
    names = [n for n in later[0].values if all(n in sample.values for sample in later)]
    return [
        trend_of(name, seconds, np.array([s.values[name] for s in later]), limit_of(name))
        for name in names
    ]
