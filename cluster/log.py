"""One line per state change: time, level, process, message with key=value pairs. Nothing per token."""

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure_logging(level: str = "INFO") -> None:
    """Sends this process's log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger("pointsman")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def logger(name: str) -> logging.Logger:
    return logging.getLogger(f"pointsman.{name}")
