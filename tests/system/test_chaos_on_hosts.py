"""Ranks, hosts and their network fail among greedy streams; each stream gives the tokens of an undisturbed run."""

import pytest

from tests.chaos.host_disturbances import KINDS
from tests.chaos.on_hosts import HostChaos, run
from tests.chaos.outcomes import num_hits
from tests.helpers.hosts.desk import record

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def test_streams_go_on_token_for_token_whatever_fails_but_the_head() -> None:
    killed, _frozen, to_the_spare, booted, cut_briefly, _cut, cut_for_long = KINDS
    kinds = killed, cut_briefly, booted, to_the_spare, cut_for_long
    outcomes = list(run(HostChaos(kinds, seed=3, num_streams=8, max_tokens=48)))
    record("chaos on hosts", [str(outcome) for outcome in outcomes])
    assert num_hits(outcomes) == len(kinds)
    assert [outcome for outcome in outcomes if outcome.wrong] == []
