"""When an all-to-all pays."""

import pytest

from expert_workers.exchange.density import all_to_all_pays


@pytest.mark.parametrize(
    ("num_pairs", "ep_size", "pays"),
    [
        (240, 16, True),
        (216, 16, True),
        (215, 16, False),
        (51, 8, True),
        (50, 8, False),
        (12, 4, False),
        (0, 1, False),
    ],
)
def test_an_all_to_all_pays_on_many_ranks_of_which_nearly_all_pairs_have_rows(
    num_pairs: int, ep_size: int, pays: bool
) -> None:
    assert all_to_all_pays(num_pairs, ep_size) == pays
