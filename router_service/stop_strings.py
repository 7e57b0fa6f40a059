"""Stop strings over a growing text: found across token borders, never sent, nothing lost when they don't come.

The generation ends before the match that starts earliest in the text, whatever the token borders are. Of matches that
start at the same place the shortest counts, because it is complete first (the text is the same either way).
A match that is complete within the first `min_tokens` tokens does not count (vLLM).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """num_tokens: 1-based number of the token that completed the stop string, text."""

    num_tokens: int
    text: str


@dataclass(frozen=True)
class _Candidate:
    start: int
    num_tokens: int
    text: str


class StopStrings:
    """Feeds on text, gives back what may be sent. Owner of the text that could still become a match.

    Invariant: the buffer starts where the earliest possible match starts, or is empty.
    """

    def __init__(self, stop: Sequence[str], *, min_tokens: int = 0) -> None:
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_exempt = 0
        """Characters at the start of the buffer that come from the first min_tokens tokens."""
        self._longest = max((len(text) for text in stop), default=0)
        self._buffer = ""
        self._best: _Candidate | None = None
        self.match: StopMatch | None = None

    def add(self, text: str, num_tokens: int) -> str:
        """Text that is safe to send after token number `num_tokens`. Once `match` is set there is no more."""
        if self.match is not None:
            return ""
        if not self._stop:
            return text
        self._buffer += text
        if num_tokens <= self._min_tokens:
            self._num_exempt = len(self._buffer)
        self._best = self._better(self._find(num_tokens))
        pending = self._earliest_pending()
        if self._best is not None:
            # An earlier start that may still complete would win, so nothing is decided before it fails.
            return "" if pending < self._best.start else self._end_at(self._best)
        return self._take(pending)

    def finish(self, text: str, num_tokens: int) -> str:
        """The rest of the text at the end of the generation, `text` being its last piece."""
        sent = self.add(text, num_tokens)
        if self.match is not None:
            return sent
        if self._best is not None:
            return sent + self._end_at(self._best)
        return sent + self._take(len(self._buffer))

    def _find(self, num_tokens: int) -> _Candidate | None:
        exempt = self._num_exempt
        found = [
            (start, len(stop), stop)
            for stop in self._stop
            if (start := self._buffer.find(stop, max(0, exempt + 1 - len(stop)))) >= 0
        ]
        start, _, text = min(found, default=(-1, 0, ""))
        return _Candidate(start, num_tokens, text) if found else None

    def _better(self, found: _Candidate | None) -> _Candidate | None:
        if found is None or (self._best is not None and self._best.start <= found.start):
            return self._best
        return found

    def _earliest_pending(self) -> int:
        """Start of the earliest suffix that is a proper beginning of a stop string; the buffer's length if none."""
        for start in range(max(0, len(self._buffer) - self._longest + 1), len(self._buffer)):
            tail = self._buffer[start:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stop):
                return start
        return len(self._buffer)

    def _end_at(self, candidate: _Candidate) -> str:
        self.match = StopMatch(candidate.num_tokens, candidate.text)
        return self._buffer[: candidate.start]

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._num_exempt = max(0, self._num_exempt - length)
        return taken
