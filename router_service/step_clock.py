"""Predicts how long a step takes, so that its deadline is a multiple of that and never a constant."""

from dataclasses import dataclass

_SMOOTHING = 0.1
SMALL_STEP_TOKENS = 16
"""Per rank; up to here a step's time is its fixed part."""


@dataclass
class StepClock:
    """Seconds per token of the busiest rank, smoothed. Owner of the prediction; told of every committed step.

    A step that takes no time to compute still has a deadline of `floor_seconds`: below that a late answer is the
    machine's scheduling and not a lost rank. What was never seen is predicted long: the first step as the floor, the
    first large one as that many small ones.
    """

    factor: float
    floor_seconds: float
    seconds_per_token: float | None = None
    seconds_fixed: float | None = None

    def predict(self, max_tokens_per_rank: int) -> float:
        if self.seconds_per_token is not None:
            return (self.seconds_fixed or 0.0) + self.seconds_per_token * max_tokens_per_rank
        if self.seconds_fixed is not None:
            return self.seconds_fixed * max(1.0, max_tokens_per_rank / SMALL_STEP_TOKENS)
        return self.floor_seconds

    def deadline(self, max_tokens_per_rank: int) -> float:
        return max(self.floor_seconds, self.factor * self.predict(max_tokens_per_rank))

    def observe(self, max_tokens_per_rank: int, seconds: float) -> None:
        """Small steps teach the fixed part, large ones the slope; the first lesson counts whole."""
        if max_tokens_per_rank <= SMALL_STEP_TOKENS:
            self.seconds_fixed = _smoothed(self.seconds_fixed, seconds)
        else:
            slope = max(0.0, seconds - (self.seconds_fixed or 0.0)) / max_tokens_per_rank
            self.seconds_per_token = _smoothed(self.seconds_per_token, slope)


def _smoothed(value: float | None, lesson: float) -> float:
    return lesson if value is None else value + _SMOOTHING * (lesson - value)
