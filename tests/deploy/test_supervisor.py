"""Which rank is blamed when several end."""

from deploy.actor_calls import End
from deploy.supervisor import worst

BROKEN_EXCHANGE = End("raised", "ExchangeError: connection closed by peer", exchange=True)
DEAD = End("died", "its process died")
FAILED = End("raised", "RuntimeError: out of memory")


def test_a_dead_process_explains_broken_exchanges() -> None:
    assert worst({0: BROKEN_EXCHANGE, 1: BROKEN_EXCHANGE, 2: DEAD}) == (2, DEAD)


def test_a_failure_of_its_own_explains_broken_exchanges() -> None:
    assert worst({0: BROKEN_EXCHANGE, 3: FAILED}) == (3, FAILED)


def test_a_dead_process_explains_failures() -> None:
    assert worst({0: FAILED, 1: DEAD}) == (1, DEAD)


def test_a_broken_exchange_alone_is_all_that_is_known() -> None:
    assert worst({1: BROKEN_EXCHANGE}) == (1, BROKEN_EXCHANGE)
