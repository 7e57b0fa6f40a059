"""Key pairs of a cell's channels (CurveZMQ): who may connect to which socket, and how a peer knows whom it talks to.

The launcher makes them, anew for every cell, and hands each process its own. They stand on no command line, in no file
and in no log.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Self

import zmq


@dataclass(frozen=True)
class KeyPair:
    """Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class ServerKeys:
    """Of a socket that is bound: its own pair, and the public keys of those who may connect."""

    pair: KeyPair
    peers: frozenset[bytes]


@dataclass(frozen=True)
class PeerKeys:
    """Of a socket that connects: its own pair, and the public key of the only server that it talks to."""

    pair: KeyPair
    server: bytes

    def shared_name(self, purpose: bytes) -> str:
        """Known to those who hold this pair, and to nobody who hears it what the pair is. purpose: up to 16 bytes"""
        return hashlib.blake2b(self.pair.secret, digest_size=16, person=purpose).hexdigest()


@dataclass(frozen=True)
class EngineKeys:
    """Of the engine's sockets: to HTTP servers and the launcher, and to the expert workers."""

    clients: ServerKeys
    workers: ServerKeys


@dataclass(frozen=True)
class CellKeys:
    """Of a whole cell; only the launcher has all of them. A worker's key opens no door for clients, nor theirs one for
    workers."""

    engine: EngineKeys
    launcher: PeerKeys
    http_server: PeerKeys
    worker: PeerKeys

    @classmethod
    def make(cls) -> Self:
        for_clients, for_workers = KeyPair.make(), KeyPair.make()
        launcher, http_server, worker = (KeyPair.make() for _ in range(3))
        return cls(
            engine=EngineKeys(
                clients=ServerKeys(for_clients, frozenset({launcher.public, http_server.public})),
                workers=ServerKeys(for_workers, frozenset({worker.public})),
            ),
            launcher=PeerKeys(launcher, for_clients.public),
            http_server=PeerKeys(http_server, for_clients.public),
            worker=PeerKeys(worker, for_workers.public),
        )
