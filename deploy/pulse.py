"""Whether a process that nobody waits for still does anything: it is asked for a sign of life now and then."""

import time
from collections.abc import Callable
from typing import Any

PULSE_SECONDS = 5.0
"""So often it is asked."""
HANG_SECONDS = 15.0
"""One that gives no sign within this time hangs: it has to answer beside whatever it does."""
MIN_LOOKS = 5
"""So often it was looked for in that time: this process itself may have been held up."""


def killed_after(silent_seconds: float) -> str:
    """The reason of an end that was ours: whoever only sees the process die would look for another."""
    return f"it hung and was killed by this server: no sign of life for {silent_seconds:g} s"


class Pulse:
    """Of one process at a time."""

    def __init__(
        self,
        ask: Callable[[], Any],
        result: Callable[[Any], tuple[bool, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ask: gives a call. result: what has come of it, as `rank_recovery.RankProcesses.result`"""
        self._ask = ask
        self._result = result
        self._clock = clock
        self._call: Any = None
        self._num_looks = 0
        self._asked_seconds = clock()

    @property
    def asked_seconds(self) -> float:
        """When it was asked last: one that hangs has lived until then at the most."""
        return self._asked_seconds

    def begin(self) -> None:
        """Another process is asked from now on."""
        self._call, self._asked_seconds = None, self._clock()

    def hangs(self) -> bool:
        """A call that fails tells of a death, which is somebody else's to find."""
        now = self._clock()
        if self._call is None:
            if now >= self._asked_seconds + PULSE_SECONDS:
                self._call, self._asked_seconds, self._num_looks = self._ask(), now, 0
            return False
        if self._result(self._call) != (False, None):
            self._call = None
            return False
        self._num_looks += 1
        return self._num_looks >= MIN_LOOKS and now >= self._asked_seconds + HANG_SECONDS
