"""Every metric has its name in the documentation."""

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import Metrics

API = Path(__file__).parents[2] / "docs" / "api.md"
PREFIX = "pointsman_"


def documented_name(name: str, kind: str) -> str:
    """The parser leaves `_total` out of the names of counters."""
    return f"`{name.removeprefix(PREFIX)}{'_total' if kind == 'counter' else ''}`"


def test_every_metric_is_listed_in_the_api_documentation() -> None:
    page = Metrics(CollectorRegistry()).render().decode()
    families = list(text_string_to_metric_families(page))
    section = API.read_text().partition("## Metrics")[2].partition("\n## ")[0]
    assert len(families) > 20
    assert [
        family.name
        for family in families
        if documented_name(family.name, family.type) not in section
    ] == []
