import pytest
from prometheus_client import CollectorRegistry

from cluster.metrics import Metrics
from loadtest.answer import TokenCounts
from loadtest.own_server import ServerFailed, own_server, token_counts


def test_tokens_are_read_from_the_servers_metrics() -> None:
    metrics = Metrics(CollectorRegistry())
    for source, tokens in (("computed", 3_000_001), ("cached", 20), ("replayed", 30)):
        metrics.prompt_tokens.labels(source).inc(tokens)
    metrics.generation_tokens.inc(40)
    assert token_counts(metrics.render().decode()) == TokenCounts(3_000_001, 20, 30, 40)


def test_a_server_that_does_not_start_is_said_with_its_exit_code() -> None:
    with (
        pytest.raises(ServerFailed, match="ended with 2 before it was ready"),
        own_server(["--port", "99999"]),
    ):
        raise AssertionError("it has no such port")
