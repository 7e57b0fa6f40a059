"""Looking at this host, and at listeners that are reached, are not there, or are somebody else's. No Ray is needed."""

import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path

from deploy.planning import DEMO_MODEL
from deploy.probe import Listener, Probe, greet_all

LOOPBACK = "127.0.0.1"


def test_a_listener_is_reached_by_another_probe() -> None:
    listener = Probe(LOOPBACK).listen()
    assert Probe(LOOPBACK).unreached({"there": listener}) == {}


def test_a_port_that_nobody_listens_on_is_told_with_the_reason() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    reasons = Probe(LOOPBACK).unreached({"there": Listener(LOOPBACK, port, b"n" * 16)})
    assert reasons == {"there": f"port {port}: Connection refused"}


def test_a_peer_that_resets_its_connection_does_not_end_the_listener() -> None:
    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    with socket.create_connection((LOOPBACK, port)) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    threading.Thread(target=greet_all, args=(server, b"n" * 16), daemon=True).start()
    assert Probe(LOOPBACK).unreached({"there": Listener(LOOPBACK, port, b"n" * 16)}) == {}


def test_an_address_that_belongs_to_another_host_is_found_out() -> None:
    listener = Probe(LOOPBACK).listen()
    meant = replace(listener, nonce=b"n" * 16)
    reasons = Probe(LOOPBACK).unreached({"there": meant})
    assert reasons == {"there": f"port {listener.port}: another host answered"}


def test_facts_tell_the_interface_of_the_address_and_the_model() -> None:
    facts = Probe(LOOPBACK).facts(DEMO_MODEL, 0)
    assert (facts.interface, facts.model_problem) == ("lo", None)
    assert facts.model_fingerprint is not None
    assert LOOPBACK not in facts.addresses


def test_facts_of_a_host_without_the_model_say_so(tmp_path: Path) -> None:
    facts = Probe(LOOPBACK).facts(tmp_path / "absent", 0)
    assert (facts.model_fingerprint, facts.model_problem) == (
        None,
        f"there is no model directory {tmp_path}/absent",
    )
