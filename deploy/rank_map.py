"""The map of a cell's ranks as text: one line per host. Pure."""

from collections.abc import Mapping

from cluster.rank_place import RankPlace


def map_lines(places: Mapping[int, RankPlace]) -> list[str]:
    """`host 10.0.0.1: rank 0 on cuda:0, rank 1 on cuda:1`, hosts in the order of their first rank."""
    by_host: dict[str, list[str]] = {}
    for rank, place in sorted(places.items()):
        by_host.setdefault(place.host, []).append(f"rank {rank} on {place.device}")
    return [f"host {host}: {', '.join(ranks)}" for host, ranks in by_host.items()]
