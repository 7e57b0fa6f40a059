"""What the process of a rank is called on the engine's channel. No two processes ever have one name: of two that were
started for a rank, because the first was cut off and not dead, the engine hears the later one only."""

import re
from dataclasses import dataclass
from typing import Self

_NAME = re.compile(rb"rank-(\d{1,9})\.(\d{1,9})")


@dataclass(frozen=True)
class RankName:
    """came_with: generation of the group that the process was started for"""

    rank: int
    came_with: int = 0

    def __str__(self) -> str:
        return f"rank-{self.rank}.{self.came_with}"

    def __bytes__(self) -> bytes:
        return str(self).encode()

    @classmethod
    def read(cls, peer: bytes) -> Self | None:
        match = _NAME.fullmatch(peer)
        return None if match is None else cls(int(match[1]), int(match[2]))
