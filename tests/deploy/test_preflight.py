"""What stands in the way of a cell over several hosts, told per host with its remedy."""

from dataclasses import replace

import pytest

from deploy.preflight import Findings, HostFacts, Unreached, failures

HEAD, OTHER = "10.0.0.1", "10.0.0.2"
GOOD = HostFacts(
    address=HEAD,
    python="3.11.7",
    torch="2.13.0",
    ray="2.60.0",
    pointsman="0.1.0",
    model_fingerprint="a" * 64,
    model_problem=None,
    interface="eth0",
    addresses=("192.168.0.1",),
    ray_gpus=8,
    visible_gpus=8,
    memory_bytes=2**40,
    has_token_auth=True,
)


def told(other: HostFacts | None = None, **found: object) -> tuple[str, ...]:
    """Failures of a good head and another host, which is good too unless given."""
    facts = (GOOD, other or replace(GOOD, address=OTHER))
    findings = Findings(front=HEAD, facts=facts, silent={}, unreached=())
    return failures(replace(findings, **found))  # type: ignore[arg-type]  # of the same fields


def test_equal_hosts_that_reach_each_other_have_no_failure() -> None:
    assert told() == ()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"python": "3.12.1"}, "Python 3.12.1 differs from 3.11.7 on 10.0.0.1: install the same"),
        ({"torch": "2.9.0"}, "torch 2.9.0 differs from 2.13.0 on 10.0.0.1: install the same"),
        ({"ray": "2.50.0"}, "ray 2.50.0 differs from 2.60.0 on 10.0.0.1: install the same"),
        ({"pointsman": "0.2.0"}, "pointsman 0.2.0 differs from 0.1.0 on 10.0.0.1: install the"),
        ({"torch": None}, "PyTorch is not installed: install pointsman there"),
        (
            {"model_fingerprint": None, "model_problem": "there is no model directory /m"},
            "there is no model directory /m; every host needs the checkpoint under the same path",
        ),
        (
            {"model_fingerprint": "b" * 64},
            f"the model directory holds other content (fingerprint {'b' * 16}) than on 10.0.0.1 "
            f"({'a' * 16}): copy the checkpoint again",
        ),
        ({"interface": None}, "no network interface owns that address"),
        ({"visible_gpus": 6}, "Ray counts 8 GPUs, PyTorch sees 6: install a CUDA build"),
        ({"has_token_auth": False}, "Ray runs without token authentication"),
    ],
)
def test_a_host_that_is_not_as_it_should_be_is_named_with_the_remedy(
    change: dict[str, object], line: str
) -> None:
    other = replace(GOOD, address=OTHER, **change)  # type: ignore[arg-type]  # of the same fields
    (failure,) = told(other)
    assert failure.startswith(f"host {OTHER}: {line}")


def test_a_loopback_address_is_refused_where_there_are_several_hosts() -> None:
    (failure,) = told(replace(GOOD, address="127.0.0.1", interface="lo"))
    assert failure == (
        "host 127.0.0.1: a loopback address, which no other host reaches: start Ray there with "
        "--node-ip-address=192.168.0.1"
    )


def test_one_host_alone_may_be_on_loopback() -> None:
    alone = replace(GOOD, address="127.0.0.1", interface="lo")
    assert failures(Findings("127.0.0.1", (alone,), {}, ())) == ()


def test_a_host_that_two_others_do_not_reach_is_one_line() -> None:
    reason = "port 4711: timed out"
    (failure,) = told(
        unreached=(Unreached("10.0.0.3", OTHER, reason), Unreached(HEAD, OTHER, reason))
    )
    assert failure == (
        "host 10.0.0.2: not reached from 10.0.0.1, 10.0.0.3 (port 4711: timed out): let the hosts reach all "
        "ports of each other, or start Ray there with --node-ip-address=192.168.0.1"
    )


def test_all_failures_are_told_at_once() -> None:
    bad = replace(GOOD, address=OTHER, ray="2.50.0", has_token_auth=False)
    lines = told(
        bad,
        silent={"10.0.0.4": "its process died"},
        on_front=("--port 8000: cannot listen on 10.0.0.1:8000: Address already in use",),
        unreached=(Unreached(OTHER, HEAD, "port 9: refused"),),
    )
    assert [line.partition(":")[0] for line in lines] == [
        "host 10.0.0.4",
        f"host {HEAD}",
        f"host {OTHER}",
        f"host {OTHER}",
        f"host {HEAD}",
    ]
