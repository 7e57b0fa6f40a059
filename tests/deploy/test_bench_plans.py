import pytest

from cluster.errors import ConfigError
from deploy.bench import plans


@pytest.mark.parametrize("ep_size", [1, 4])
def test_every_shape_has_a_row_with_times_and_bytes(ep_size: int) -> None:
    rows = plans.run(ep_size)
    assert [row["shape"] for row in rows] == [shape.name for shape in plans.SHAPES]
    for row in rows:
        assert row["ep_size"] == ep_size
        assert row["compile_ms_per_1000_tokens"] > 0
        assert row["plan_ms_per_step_of_512"] > 0
        assert row["bytes_all_ranks_per_1000_tokens"] >= row["bytes_source_rank_per_1000_tokens"]


def test_an_ep_size_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        plans.run(3)
