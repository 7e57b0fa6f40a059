"""A cell's HTTP answers as tests use them: plain JSON, metrics as numbers."""

import json
import random
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.served import eventually

TIMEOUT_SECONDS = 60.0
ALL_ON = {"route_replay": True, "planned_dispatch": True, "prefix_store": True}
MetricValues = dict[tuple[str, tuple[str, ...]], float]
"""By sample name and label values in order of the label names."""


def random_prompt(seed: int, num_tokens: int, vocab_size: int = 3000) -> list[int]:
    """Token ids that no text has, so that no other test has cached them."""
    draw = random.Random(seed)
    return [draw.randrange(16, vocab_size) for _ in range(num_tokens)]


class CellApi:
    """Both ports of one cell."""

    def __init__(self, base_url: str, admin_url: str) -> None:
        self.base_url = base_url
        self.admin_url = admin_url
        self.http = httpx.Client(timeout=TIMEOUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()

    def complete(self, prompt: str | list[int], max_tokens: int = 8, **fields: Any) -> Any:
        answer = self.http.post(
            f"{self.base_url}/v1/completions", json=completion_body(prompt, max_tokens, **fields)
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, prompt: str | list[int], max_tokens: int = 8, **fields: Any) -> list[Any]:
        """The pieces of the one choice, in order. Raises KeyError when the stream says an error."""
        pieces: list[Any] = []
        body = completion_body(prompt, max_tokens, stream=True, **fields)
        with self.http.stream("POST", f"{self.base_url}/v1/completions", json=body) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    pieces += json.loads(line.removeprefix("data: "))["choices"]
        return pieces

    def evict(self, part: str) -> Any:
        answer = self.http.post(f"{self.admin_url}/admin/evict", json={"part": part})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def features(self, **states: bool) -> Any:
        """All of them after the switch."""
        answer = self.http.post(f"{self.admin_url}/admin/features", json=states)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self) -> Any:
        return self.http.get(f"{self.admin_url}/admin/status").json()

    def metrics(self) -> MetricValues:
        return {
            (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.metrics_text())
            for sample in family.samples
        }

    def metric(self, name: str, *labels: str) -> float:
        return self.metrics()[f"pointsman_{name}", labels]

    def rise_since(self, before: MetricValues) -> MetricValues:
        """Series that have come since then rose from zero."""
        return {key: value - before.get(key, 0.0) for key, value in self.metrics().items()}

    def metrics_text(self) -> str:
        return self.http.get(f"{self.base_url}/metrics").text

    def is_idle(self) -> bool:
        """Waits for it: an abort reaches the engine a moment after its client has left."""

        def idle() -> bool:
            status = self.status()
            return (
                status["num_running"] == status["num_waiting"] == 0
                and status["kv_blocks_leased"] == 0
            )

        return eventually(idle, 10.0, "an idle cell without leases")


def completion_body(prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "minnow",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def source_of(answer: Any) -> tuple[int, int]:
    """Cached and replayed prompt tokens."""
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], details["replayed_tokens"]
