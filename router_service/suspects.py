"""Which request breaks the ranks: whoever was in two broken steps, and in no good one since the first, runs alone.

    {a b c} broke ─► {a c} broke ─► a alone passed ─► c alone broke ─► c is to blame
                                                  └─► c alone passed ─► all together again

A step of one request is cheap and a break costs seconds: innocents pass one after the other, no halves are tried.
"""

from collections import deque
from collections.abc import Sequence

from router_service.request import Request

ALONE_AFTER = 2
"""Broken steps. The first may be anybody's accident."""
BREAKS_RANKS = (
    f"{ALONE_AFTER} steps that computed this request broke the ranks, and so did one that computed nothing else: it "
    "is ended, so that others go on; the server's log says how the ranks broke"
)


class Suspects:
    """Owner of who was in broken steps and of the queue of those to run alone."""

    def __init__(self) -> None:
        self._num_broken: dict[Request, int] = {}
        """Steps, since the last good one of that request."""
        self._queue: deque[Request] = deque()

    @property
    def alone(self) -> Request | None:
        """The only one that the next step may compute; None: all may."""
        while self._queue and self._queue[0].finish_reason is not None:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def broke(self, computed: Sequence[Request]) -> Request | None:
        """A step that computed these requests. Returns the one that is to blame."""
        if self._is_of_first(computed):
            return self._queue.popleft()
        before = {r: n for r, n in self._num_broken.items() if r.finish_reason is None}
        self._num_broken = before | {r: before.get(r, 0) + 1 for r in computed}
        self._queue.extend(r for r in computed if self._num_broken[r] == ALONE_AFTER)
        return None

    def passed(self, computed: Sequence[Request]) -> None:
        """A step that computed these was committed."""
        if not self._num_broken:
            return
        for request in computed:
            self._num_broken.pop(request, None)
        if self._is_of_first(computed):
            self._queue.popleft()

    def pass_over(self) -> bool:
        """Nothing of the one that should be alone can be computed now. False when there is none."""
        if self.alone is None:
            return False
        del self._num_broken[self._queue.popleft()]
        return True

    def _is_of_first(self, computed: Sequence[Request]) -> bool:
        return bool(self._queue) and list(computed) == [self._queue[0]]
