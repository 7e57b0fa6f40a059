"""How much of a growing text is a JSON value's beginning: character by character, nothing is built (RFC 8259).

What it takes can always be gone on with to a JSON value, or is one. Unpaired surrogates are refused, as decoders do.
"""

import re

MAX_DEPTH = 256
_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPED = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?(?:[eE][+-]?[0-9]*)?)")
_NUMBER_CHARACTERS = "0123456789+-.eE"
MAX_NUMBER_LENGTH = 1024


class JsonScanner:
    """Owner of the place in the grammar of JSON. A method `_…` takes one character or refuses it, where it stands for
    what comes next."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """Closing marks of arrays and objects that are open."""
        self._next = self._value
        self._word = ""
        """Rest of a literal, a number so far, or hexadecimal digits of an escape."""
        self._is_key = False
        self._after_high_surrogate = False

    @staticmethod
    def behind_a_member() -> "JsonScanner":
        """In an object, a member of which has just ended."""
        scanner = JsonScanner()
        scanner._open, scanner._next = ["}"], scanner._behind_value
        return scanner

    @property
    def has_ended(self) -> bool:
        """The array or object is closed."""
        return not self._open and self._next == self._behind_value

    def scan(self, text: str, start: int) -> int:
        """Where what it takes ends: at the end of the text, behind the value, or at what cannot come."""
        place = start
        while place < len(text) and not self.has_ended:
            if self._next == self._in_string and not self._after_high_surrogate:
                match = _PLAIN.match(text, place)
                assert match is not None
                place = match.end()
                if place == len(text):
                    break
            if not self._next(text[place]):
                break
            place += 1
        return place

    def _value(self, character: str) -> bool:
        if character in _SPACE:
            return True
        if character in "{[":
            return self._opened(character)
        if character == '"':
            self._is_key, self._next = False, self._in_string
        elif character in _WORDS:
            self._word, self._next = _WORDS[character], self._in_word
        elif character in "-0123456789":
            self._word, self._next = character, self._in_number
        else:
            return False
        return True

    def _opened(self, character: str) -> bool:
        if len(self._open) == MAX_DEPTH:
            return False
        is_object = character == "{"
        self._open.append("}" if is_object else "]")
        self._next = self._first_key if is_object else self._first_item
        return True

    def _first_item(self, character: str) -> bool:
        return self._closed(character) or self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._closed(character) or self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._is_key, self._next = True, self._in_string
            return True
        return character in _SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._next = self._value
            return True
        return character in _SPACE

    def _behind_value(self, character: str) -> bool:
        if character == "," and self._open:
            self._next = self._key if self._open[-1] == "}" else self._value
            return True
        return self._closed(character) or character in _SPACE

    def _closed(self, character: str) -> bool:
        if not self._open or character != self._open[-1]:
            return False
        self._open.pop()
        self._next = self._behind_value
        return True

    def _in_string(self, character: str) -> bool:
        """A character with a meaning; `scan` skips the others."""
        if character == "\\":
            self._next = self._in_escape
            return True
        if character != '"' or self._after_high_surrogate:
            return False
        self._next = self._colon if self._is_key else self._behind_value
        return True

    def _in_escape(self, character: str) -> bool:
        if character == "u":
            self._word, self._next = "", self._in_hex
            return True
        self._next = self._in_string
        return character in _ESCAPED and not self._after_high_surrogate

    def _in_hex(self, character: str) -> bool:
        if character not in _HEX:
            return False
        self._word += character
        if len(self._word) < 2:
            return True
        is_high = self._word[0] in "dD" and self._word[1] in "89abAB"
        is_low = self._word[0] in "dD" and self._word[1] in "cdefCDEF"
        if is_low != self._after_high_surrogate:
            return False
        if len(self._word) == 4:
            self._after_high_surrogate, self._next = is_high, self._in_string
        return True

    def _in_word(self, character: str) -> bool:
        if character != self._word[0]:
            return False
        self._word = self._word[1:]
        if not self._word:
            self._next = self._behind_value
        return True

    def _in_number(self, character: str) -> bool:
        if character in _NUMBER_CHARACTERS:
            self._word += character
            is_short = len(self._word) <= MAX_NUMBER_LENGTH
            return is_short and _NUMBER_BEGUN.fullmatch(self._word) is not None
        if not _NUMBER.fullmatch(self._word):
            return False
        self._next = self._behind_value
        return self._behind_value(character)
