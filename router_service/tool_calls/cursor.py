"""A place in a growing text, for formats that are read as if the text were all there.

A reading is a generator: it yields when it needs more text and is resumed when there is some, so the state of a half
read call is where its code stands. What has been looked at is not looked at again, but for a literal of bounded length.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from router_service.tool_calls.json_scanner import JsonScanner

T = TypeVar("T")
Reading = Generator[None, None, T]
Tell = Callable[[str, bool], None]
"""Told of the next piece of a JSON value, and whether it is the last one."""

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z0-9_-]*")


class NotACallError(Exception):
    """The text is not, or not any more, what the format describes."""


def _nobody(piece: str, is_last: bool) -> None:
    pass


class Cursor:
    """Owner of the place that was read up to. text: grows at its end, by whoever resumes the reading."""

    def __init__(self, text: str, place: int) -> None:
        self.text = text
        self.place = place
        self.ended = False
        """No more text will come."""

    def space(self) -> Reading[None]:
        """Skips white space."""
        while True:
            match = _SPACE.match(self.text, self.place)
            assert match is not None
            self.place = match.end()
            if self.place < len(self.text) or self.ended:
                return
            yield

    def at(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next, which is then behind the cursor."""
        while True:
            rest = self.text[self.place : self.place + len(literal)]
            if rest == literal:
                self.place += len(literal)
                return True
            if self.ended or not literal.startswith(rest):
                return False
            yield

    def closing(self, literal: str) -> Reading[None]:
        """Raises NotACallError unless `literal` comes next, as far as the text goes: models leave out what closes
        their last call, and limits cut it."""
        if not (yield from self.at(literal)):
            if not literal.startswith(self.text[self.place :]):
                raise NotACallError
            self.place = len(self.text)

    def literal(self, literal: str) -> Reading[None]:
        """Raises NotACallError unless `literal` comes next."""
        if not (yield from self.at(literal)):
            raise NotACallError

    def word(self, max_length: int) -> Reading[str]:
        """Letters, digits, _ and -, as names of functions are made of; possibly none."""
        while True:
            match = _WORD.match(self.text, self.place)
            assert match is not None
            if len(match[0]) > max_length:
                raise NotACallError
            if match.end() < len(self.text) or self.ended:
                self.place = match.end()
                return match[0]
            yield

    def opens_object(self) -> Reading[None]:
        """Goes nowhere. Raises NotACallError unless a JSON object begins here, as far as its first key or its end."""
        place = self.place
        yield from self.literal("{")
        yield from self.space()
        if not ((yield from self.at('"')) or (yield from self.at("}"))):
            raise NotACallError
        self.place = place

    def json(self, tell: Tell = _nobody) -> Reading[str]:
        """The text of one JSON object, told as it comes.

        Raises NotACallError as soon as something stands there that is in no JSON.
        """
        yield from self.opens_object()
        start = self.place
        yield from self.through(JsonScanner(), tell)
        return self.text[start : self.place]

    def through(self, scanner: JsonScanner, tell: Tell = _nobody) -> Reading[None]:
        """Up to where the scanner's value ends. Raises as `json` does."""
        while True:
            start = self.place
            self.place = scanner.scan(self.text, start)
            if self.place > start:
                tell(self.text[start : self.place], scanner.has_ended)
            if scanner.has_ended:
                return
            if self.place < len(self.text) or self.ended:
                raise NotACallError
            yield
