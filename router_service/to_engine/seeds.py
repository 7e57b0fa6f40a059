"""Seeds of what a client asked for without one: drawn here, so that an engine which goes on with it draws alike."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from cluster.messages import Submit


def with_seeds(submits: Sequence[Submit], draw: Callable[[], int]) -> list[Submit]:
    """Choices of one prompt share the seed of the first one, which comes before them."""
    seeds: dict[str | None, int] = {}
    seeded = []
    for submit in submits:
        seed = submit.sampling.seed
        if seed is None:
            seed = seeds[submit.leader_id] if submit.leader_id in seeds else draw()
        seeds[submit.request_id] = seed
        seeded.append(replace(submit, sampling=replace(submit.sampling, seed=seed)))
    return seeded
