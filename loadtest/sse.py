"""Server-sent events out of bytes as the network cuts them. No HTTP, no JSON."""

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventReader:
    """Owner of the bytes of one stream that do not make a whole line yet, and of the event that is being read.

    As the WHATWG's HTML standard, "Interpreting an event stream", has it, for the one field that the OpenAI API uses.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._skip_line_feed = False
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that this chunk completes. Raises UnicodeDecodeError."""
        if not chunk:
            return []
        if self._skip_line_feed and chunk.startswith(b"\n"):
            # the second half of a \r\n whose first half has ended a line already
            chunk = chunk[1:]
            self._skip_line_feed = False
        if chunk:
            self._skip_line_feed = chunk.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        return [event for line in lines if (event := self._read(line.decode())) is not None]

    def _read(self, line: str) -> str | None:
        """The data of the event that this line ends."""
        if line:
            field, _, value = line.partition(":")
            if field == "data":
                self._data.append(value.removeprefix(" "))
            return None
        if not self._data:
            return None
        event = "\n".join(self._data)
        self._data = []
        return event
