"""Errors of a request that was made from a client's body name the fields of that body."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.errors import RequestError

_ENDS_A_NAME = re.compile(r"(?=[.\[]|$)")


@dataclass(frozen=True)
class FieldNames:
    """sent_as: the client's path for a path of the request; of several the longest one counts, and what follows stays.

    `{"messages[1]": "input[0]"}` makes `messages[1].content` `input[0].content`.
    """

    sent_as: Mapping[str, str] = field(default_factory=dict)

    def sent(self, path: str) -> str:
        """The client's path; `path` itself where the client wrote it so."""
        starts = [
            start
            for start in self.sent_as
            if path.startswith(start) and _ENDS_A_NAME.match(path, len(start))
        ]
        longest = max(starts, key=len, default="")
        return self.sent_as.get(longest, "") + path[len(longest) :]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, a RequestError gets the client's field, in its message too."""
        try:
            yield
        except RequestError as error:
            if error.field is not None and (name := self.sent(error.field)) != error.field:
                error.args = (_renamed(str(error), error.field, name),)
                error.field = name
            raise


def _renamed(message: str, old: str, new: str) -> str:
    """At its start as a field; elsewhere only where it is no word of the language."""
    if message.startswith(f"{old}:"):
        message = new + message[len(old) :]
    return re.sub(rf"\b{re.escape(old)}\b", lambda _: new, message) if "_" in old else message
