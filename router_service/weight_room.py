"""Do second shares of the weights fit the hosts of the ranks that will read them at the same time. Pure."""

from collections.abc import Iterable

from cluster.worker_messages import WeightsMeasured


def lack_of_room(measured: Iterable[WeightsMeasured]) -> str | None:
    """Why ranks that share a host can't read together what each of them needs beside what it holds; None if all can."""
    by_host: dict[str, list[WeightsMeasured]] = {}
    for answer in measured:
        by_host.setdefault(answer.host, []).append(answer)
    for ranks in by_host.values():
        needed = sum(answer.needed_bytes for answer in ranks)
        free = min(answer.free_bytes for answer in ranks)
        if needed > free:
            return _told(ranks, needed, free)
    return None


def _told(ranks: list[WeightsMeasured], needed: int, free: int) -> str:
    names = ", ".join(str(answer.rank) for answer in ranks)
    who = f"rank {names} needs" if len(ranks) == 1 else f"ranks {names} of one host need"
    return (
        f"{who} {needed} bytes of its memory for a second share of the weights until that serves, {free} are free: "
        "free some there, or serve from more hosts"
    )
