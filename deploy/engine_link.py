"""The launcher's own line to the engine."""

import os
import time

from cluster.channel import DealerSocket
from cluster.channel_keys import PeerKeys
from cluster.messages import (
    CellStatus,
    GroupWanted,
    RankLost,
    Regroup,
    StatusQuery,
    Stop,
    ToLauncher,
    Watching,
    WeightsServed,
)
from cluster.wire import Decoder, encode


class EngineLink:
    def __init__(self, endpoint: str, keys: PeerKeys, weights: WeightsServed) -> None:
        """weights: that are served at the start"""
        self._socket = DealerSocket(f"launcher-{os.getpid()}", keys)
        self._socket.connect(endpoint)
        self._decoder: Decoder[ToLauncher] = Decoder(ToLauncher)
        self._next_query = 0
        self._wanted: list[GroupWanted] = []
        self._weights = weights
        self.watch()

    @property
    def weights(self) -> WeightsServed:
        """As far as the engine has said."""
        self._receive_all()
        return self._weights

    def watch(self) -> None:
        """Once for each engine that is started at the endpoint: it tells this process then what it wants. What an
        engine before had wanted counts for nothing."""
        self._receive_all()
        self._wanted.clear()
        self._socket.send(encode(Watching()))

    def status(self, timeout_seconds: float) -> CellStatus | None:
        """None when the engine does not answer in time."""
        self._next_query += 1
        self._socket.send(encode(StatusQuery(self._next_query)))
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            message = self._receive(remaining)
            if isinstance(message, CellStatus) and message.query_id == self._next_query:
                return message
        return None

    def take_wanted(self) -> list[GroupWanted]:
        """What the engine has asked for since the last call. Does not wait."""
        self._receive_all()
        wanted, self._wanted = self._wanted, []
        return wanted

    def rank_lost(self, rank: int, reason: str) -> None:
        self._socket.send(encode(RankLost(rank, reason)))

    def regroup(self, regroup: Regroup) -> None:
        self._socket.send(encode(regroup))

    def stop(self, reason: str) -> None:
        self._socket.send(encode(Stop(reason)))

    def close(self) -> None:
        self._socket.close_after_sending(1.0)

    def _receive_all(self) -> None:
        while self._receive(0.0) is not None:
            pass

    def _receive(self, timeout_seconds: float) -> ToLauncher | None:
        frame = self._socket.receive(timeout_seconds)
        if frame is None:
            return None
        message = self._decoder.decode(frame)
        if isinstance(message, GroupWanted):
            self._wanted.append(message)
        if isinstance(message, WeightsServed):
            self._weights = message
        return message
