"""What would go wrong when a cell starts over these hosts, told before it does. Pure: facts in, lines out."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True)
class HostFacts:
    """One host as a process of Ray on it sees it; None: not there.

    address:       as Ray knows the host
    interface:     the network interface that owns the address: gloo's and NCCL's
    addresses:     all others of the host that are not loopback
    model_problem: why there is no fingerprint of the model directory
    visible_gpus:  as torch counts them, asked only where Ray counts some
    """

    address: str
    python: str
    torch: str | None
    ray: str
    pointsman: str
    model_fingerprint: str | None
    model_problem: str | None
    interface: str | None
    addresses: tuple[str, ...]
    ray_gpus: int
    visible_gpus: int
    memory_bytes: int
    has_token_auth: bool


@dataclass(frozen=True)
class Unreached:
    """A connection between two hosts that failed: to an address on which the target listened."""

    source: str
    target: str
    reason: str


@dataclass(frozen=True)
class Findings:
    """What was found out about the hosts of a cluster.

    front:    address of the host that `pointsman serve` runs on; the others are compared with it
    silent:   why a host told nothing, by address
    on_front: lines about what this host lacks, for example its ports
    """

    front: str
    facts: tuple[HostFacts, ...]
    silent: dict[str, str]
    unreached: tuple[Unreached, ...]
    on_front: tuple[str, ...] = ()


def failures(found: Findings) -> tuple[str, ...]:
    """One line each, which names the host and the remedy; empty when a cell may start."""
    hosts = sorted(found.facts, key=lambda facts: facts.address)
    front = next((facts for facts in hosts if facts.address == found.front), None)
    lines = [_silent(address, reason) for address, reason in sorted(found.silent.items())]
    lines += [f"host {found.front}: {line}" for line in found.on_front]
    for facts in hosts:
        lines += _own(facts, alone=len(hosts) + len(found.silent) == 1)
        if front is not None and facts is not front:
            lines += _differences(facts, front)
    return (*lines, *_unreached(found, {facts.address: facts for facts in hosts}))


def _silent(address: str, reason: str) -> str:
    return (
        f"host {address}: nothing could be asked there: {reason}; install the same pointsman on it, and see "
        "its log under /tmp/ray/session_latest/logs"
    )


def _own(facts: HostFacts, *, alone: bool) -> list[str]:
    """What is wrong with a host whatever the others are."""
    host, lines = f"host {facts.address}", []
    if facts.torch is None:
        lines.append(f"{host}: PyTorch is not installed: install pointsman there as on the head")
    if facts.model_problem is not None:
        lines.append(
            f"{host}: {facts.model_problem}; every host needs the checkpoint under the same path"
        )
    if facts.interface is None:
        lines.append(
            f"{host}: no network interface owns that address, so gloo and NCCL have none: start Ray "
            f"there with --node-ip-address={_one_of(facts.addresses)}"
        )
    elif not alone and ip_address(facts.address).is_loopback:
        lines.append(
            f"{host}: a loopback address, which no other host reaches: start Ray there with "
            f"--node-ip-address={_one_of(facts.addresses)}"
        )
    if facts.visible_gpus < facts.ray_gpus:
        lines.append(
            f"{host}: Ray counts {facts.ray_gpus} GPUs, PyTorch sees {facts.visible_gpus}: install a CUDA "
            f"build of PyTorch that fits the driver, or start Ray with --num-gpus={facts.visible_gpus}"
        )
    if not facts.has_token_auth:
        lines.append(
            f"{host}: Ray runs without token authentication, so whoever reaches its ports runs code there: "
            "start it with RAY_AUTH_MODE=token and the same ~/.ray/auth_token on all hosts"
        )
    return lines


def _differences(facts: HostFacts, front: HostFacts) -> list[str]:
    versions = [
        ("Python", facts.python, front.python),
        ("torch", facts.torch, front.torch),
        ("ray", facts.ray, front.ray),
        ("pointsman", facts.pointsman, front.pointsman),
    ]
    lines = [
        f"host {facts.address}: {what} {here} differs from {there} on {front.address}: install the same "
        "version on all hosts"
        for what, here, there in versions
        if here is not None and there is not None and here != there
    ]
    here, there = facts.model_fingerprint, front.model_fingerprint
    if here is not None and there is not None and here != there:
        lines.append(
            f"host {facts.address}: the model directory holds other content (fingerprint {here[:16]}) than "
            f"on {front.address} ({there[:16]}): copy the checkpoint again"
        )
    return lines


def _unreached(found: Findings, facts: dict[str, HostFacts]) -> list[str]:
    """A line per host that is not reached, however many do not reach it."""
    lines = []
    for target in sorted({pair.target for pair in found.unreached}):
        pairs = [pair for pair in found.unreached if pair.target == target]
        sources = ", ".join(sorted(pair.source for pair in pairs))
        others = facts[target].addresses if target in facts else ()
        lines.append(
            f"host {target}: not reached from {sources} ({pairs[0].reason}): let the hosts reach all ports of "
            "each other"
            + (f", or start Ray there with --node-ip-address={_one_of(others)}" if others else "")
        )
    return lines


def _one_of(addresses: Sequence[str]) -> str:
    return " or ".join(addresses) or "an address that the others reach"
