"""Predicts how long a step takes, so that its deadline is a multiple of that and never a constant."""

from dataclasses import dataclass

_SMOOTHING = 0.1


@dataclass
class StepClock:
    """Seconds per token of the busiest rank, smoothed. Owner of the prediction; told of every committed step.

    A step that takes no time to compute still has a deadline of `floor_seconds`: below that a late answer is the
    machine's scheduling and not a lost rank.
    """

    factor: float
    floor_seconds: float
    seconds_per_token: float = 0.0
    seconds_fixed: float = 0.0

    def predict(self, max_tokens_per_rank: int) -> float:
        return self.seconds_fixed + self.seconds_per_token * max_tokens_per_rank

    def deadline(self, max_tokens_per_rank: int) -> float:
        return max(self.floor_seconds, self.factor * self.predict(max_tokens_per_rank))

    def observe(self, max_tokens_per_rank: int, seconds: float) -> None:
        """Small steps teach the fixed part, large ones the slope."""
        if max_tokens_per_rank <= 16:
            self.seconds_fixed += _SMOOTHING * (seconds - self.seconds_fixed)
        else:
            slope = max(0.0, seconds - self.seconds_fixed) / max_tokens_per_rank
            self.seconds_per_token += _SMOOTHING * (slope - self.seconds_per_token)
