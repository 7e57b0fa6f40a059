"""A place in a growing text, for formats that are read as if the text were all there.

A reading is a generator: it yields when it needs more text and is resumed when there is some, so the state of a half
read call is where its code stands. What has been looked at is not looked at again, but for a literal of bounded length.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_OUTSIDE_STRINGS = re.compile(r'[^"{}\[\]]*')
_INSIDE_STRINGS = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_JSON_CHARACTERS = re.compile(r"[ \t\r\n0-9A-Za-z:,.+-]*")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z0-9_-]*")


class NotACallError(Exception):
    """The text is not, or not any more, what the format describes."""


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

    def json(self) -> Reading[str]:
        """The text of one JSON object: brackets are counted outside strings, all else is for a decoder to check.

        Raises NotACallError as soon as something stands there that is in no JSON.
        """
        yield from self._first_brace()
        start, end, depth, inside = self.place, self.place, 0, False
        while True:
            match = (_INSIDE_STRINGS if inside else _OUTSIDE_STRINGS).match(self.text, end)
            assert match is not None
            if not inside and not _JSON_CHARACTERS.fullmatch(match[0]):
                raise NotACallError
            end = match.end()
            if end == len(self.text) or self.text[end] == "\\":
                if self.ended:
                    raise NotACallError
                yield
                continue
            mark, end = self.text[end], end + 1
            if mark == '"':
                inside = not inside
            else:
                depth += 1 if mark in "{[" else -1
            if depth == 0:
                self.place = end
                return self.text[start:end]

    def _first_brace(self) -> Reading[None]:
        yield from self.literal("{")
        self.place -= 1
