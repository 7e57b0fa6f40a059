"""All that a process logs at the default level, ours or a library's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Lines(logging.Handler):
    """A list of lines as a log file would have them, tracebacks included."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def about(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]


@contextmanager
def captured_logs() -> Iterator[Lines]:
    """Of `pointsman`, which does not propagate where it is configured, and of all others."""
    handler = Lines()
    ours, root = logging.getLogger("pointsman"), logging.getLogger()
    levels, propagates = (ours.level, root.level), ours.propagate
    ours.propagate = False
    for log in (ours, root):
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        for log, level in zip((ours, root), levels, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
        ours.propagate = propagates
