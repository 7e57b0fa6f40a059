"""The exception tree. Every message holds the value, the limit and the remedy.

PointsmanError
├── ConfigError            a flag, file or value that cannot be served (CLI: exit 2)
│   └── CheckpointError    a model directory that cannot be loaded, names the file and the value
├── RequestError           a request that cannot be served (HTTP 400), carries the field's name
│   ├── UnknownModelError  HTTP 404, code model_not_found
│   ├── OverloadedError    a bound was reached (HTTP 429)
│   └── ConflictError      something else is under way that it must not meet (HTTP 409)
├── CellError              the cell cannot run steps (HTTP 503; CLI: exit 1)
│   ├── RankLostError      names the rank
│   ├── GroupBrokenError   an exchange broke on a rank, mostly through another
│   ├── WeightsChangedError  the weights were exchanged before the answer was complete
│   └── DeadlineError      a wait that ended without its answer; names who is missing
├── GrammarError           a grammar, or a tokenizer, with which no output can be structured
├── PlanError              routes of which no dispatch plan can be made; their tokens travel without one
├── RouteReplayError       routes that cannot be replayed in a trainer's model, or recorded from it
├── WireError              bytes that are not a message of this protocol version
└── StoreError             a misuse of the prefix store or of a block pool that a caller can avoid
"""


class PointsmanError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(PointsmanError):
    """A flag, file or value that cannot be served."""


class CheckpointError(ConfigError):
    """A model directory that cannot be loaded."""


class RequestError(PointsmanError):
    """A request that cannot be served as it is."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownModelError(RequestError):
    """The model named in the request is not the one served."""


class OverloadedError(RequestError):
    """A queue is at its bound; the client may try again later."""


class ConflictError(RequestError):
    """What is under way must end first."""


class CellError(PointsmanError):
    """The cell cannot run steps."""


class RankLostError(CellError):
    """An expert worker died or cannot be reached."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}")
        self.rank = rank
        self.reason = reason


class GroupBrokenError(CellError):
    """The ranks cannot exchange any more; the one that says so is mostly not the cause."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class WeightsChangedError(CellError):
    """The weights were exchanged before the answer was complete; asked for again, it is one of the others."""


class DeadlineError(CellError):
    """A wait passed its deadline; the message names who did not answer."""

    def __init__(self, message: str, *, silent_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.silent_ranks = silent_ranks


class GrammarError(PointsmanError):
    """No token can be chosen by this grammar, or by any with this tokenizer."""


class PlanError(PointsmanError):
    """No dispatch plan can be made of these routes."""


class RouteReplayError(PointsmanError):
    """A trainer's model, batch and routes that do not go together."""


class WireError(PointsmanError):
    """Bytes that are not a message of this protocol version."""


class StoreError(PointsmanError):
    """A misuse of the prefix store or a block pool."""
