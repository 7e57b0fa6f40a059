"""Which peer of the engine's socket is which rank, where more than one process was started for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.rank_name import RankName


@dataclass
class RankPeers:
    """Owner of the names. A process that was cut off from its host's peers and replaced may come back at any time."""

    _came_with: dict[int, int] = field(default_factory=dict)

    def name(self, rank: int) -> bytes:
        """Of the latest process that is known."""
        return bytes(RankName(rank, self._came_with.get(rank, 0)))

    def know(self, came_with: Mapping[int, int]) -> None:
        """By rank: the group that its process was started for."""
        self._came_with |= came_with

    def takes(self, peer: bytes) -> bool:
        """Whether it speaks for its rank. A later process than the known one does from now on."""
        name = RankName.read(peer)
        if name is None or name.came_with < self._came_with.get(name.rank, 0):
            return False
        self._came_with[name.rank] = name.came_with
        return True
