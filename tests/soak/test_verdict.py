from collections.abc import Callable

import numpy as np
import pytest

from tests.soak.verdict import Floats, Sample, Trend, trend_of, trends

SECONDS = np.arange(0.0, 1200.0, 10.0)
LIMIT = 1.0
"""In ten minutes; the noise is ten times as large."""


def noise(seed: int) -> Floats:
    return np.random.default_rng(seed).normal(100.0, 10.0, len(SECONDS))


def rises_by(total: float) -> Floats:
    """Over the whole of the time, evenly."""
    return np.linspace(0.0, total, len(SECONDS))


def verdict(values: Floats, limit: float | None = LIMIT) -> Trend:
    return trend_of("series", SECONDS, values, limit)


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_that_noise_hides_from_the_eye_grows(seed: int) -> None:
    assert verdict(noise(seed) + rises_by(20.0)).grows


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_does_not_grow_beyond_what_it_can_be_mistaken_for(seed: int) -> None:
    assert not verdict(noise(seed), limit=3.0).grows


@pytest.mark.parametrize("at", [0.2, 0.4, 0.5, 0.6, 0.8])
def test_one_step_is_no_growth_wherever_it_comes(at: float) -> None:
    values = 100.0 + 50.0 * (SECONDS / SECONDS[-1] > at)
    assert not verdict(values + 0.01 * noise(1)).grows


def test_a_leak_in_steps_grows() -> None:
    values = 8.0 * (SECONDS // 240.0)
    assert verdict(values).grows


def test_a_descriptor_every_five_minutes_grows() -> None:
    assert verdict(50.0 + (SECONDS + 150.0) // 300.0, limit=0.5).grows


def test_connections_that_come_and_go_do_not_grow() -> None:
    open_now = np.random.default_rng(5).integers(20, 40, len(SECONDS)).astype(np.float64)
    assert not verdict(open_now, limit=3.0).grows


def test_what_shrinks_does_not_grow() -> None:
    assert not verdict(noise(3) - rises_by(50.0)).grows


def test_the_slope_is_told_per_ten_minutes() -> None:
    assert verdict(rises_by(SECONDS[-1] / 600.0 * 7.0)).slope == pytest.approx(7.0)


def test_a_series_without_a_limit_may_go_anywhere() -> None:
    assert not verdict(rises_by(1000.0), limit=None).grows


def test_too_few_samples_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="9 samples after the warm-up"):
        trend_of("series", SECONDS[:9], noise(1)[:9], LIMIT)


def samples(level: Callable[[float], float]) -> list[Sample]:
    return [
        Sample(s, {"memory": level(s), "now and then": s} if s else {"memory": 0.0})
        for s in SECONDS
    ]


def test_what_rises_while_it_warms_up_does_not_count() -> None:
    warming = samples(lambda seconds: min(seconds, 400.0))
    (later, _) = trends(warming, 400.0, lambda name: LIMIT)
    (whole,) = trends(warming, 0.0, lambda name: LIMIT)
    assert (later.name, later.grows) == ("memory", False)
    assert whole.slope > later.slope


def test_only_series_that_are_there_all_the_time_are_judged() -> None:
    names = [trend.name for trend in trends(samples(lambda s: 1.0), 0.0, lambda name: LIMIT)]
    assert names == ["memory"]
