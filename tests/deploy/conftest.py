"""`main` is written for a process of its own; here the process goes on, and finds what `serve` set as it was."""

import logging
import signal
from collections.abc import Iterator

import pytest

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Log lines of later tests would go to the standard error that was captured for this one, closed by then."""
    log = logging.getLogger("pointsman")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    answers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)
    for number, answer in answers.items():
        signal.signal(number, answer)
