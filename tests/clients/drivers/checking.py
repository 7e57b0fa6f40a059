"""What drivers share: the server as plain HTTP says it, checks and how they are reported. Standard library only.

A driver writes one line per check to stdout, which the runner reads: `checked NAME`, `left out NAME: WHY` or
`failed NAME: WHY`; and it exits with 1 when one failed. Other lines are the client's own.
"""

import json
import re
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 300.0
"""Longer than any answer takes on a machine that is busy with other things."""
IDLE_SECONDS = 60.0
"""So long after a client has left, its request may still be running."""
MOST_CHOICES = 128
"""Of one request; a server whose queue is shorter refuses it as a whole."""
_SAMPLE = re.compile(r"^pointsman_(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)

Json = dict[str, Any]


@dataclass(frozen=True)
class TokenCounts:
    """Since the server was started, or between two moments."""

    computed: float
    cached: float
    replayed: float
    generated: float

    @property
    def prompt(self) -> float:
        return self.computed + self.cached + self.replayed

    def __sub__(self, before: "TokenCounts") -> "TokenCounts":
        return TokenCounts(
            self.computed - before.computed,
            self.cached - before.cached,
            self.replayed - before.replayed,
            self.generated - before.generated,
        )


class CheckFailed(Exception):
    """The client got something else than it should."""


class LeftOut(Exception):
    """This server gives no occasion for the check."""


@dataclass(frozen=True)
class Server:
    """As the runner passes it: `driver.py URL MODEL API_KEY TOKENIZER_DIR`."""

    url: str
    model: str
    api_key: str
    tokenizer_dir: Path

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's API are given."""
        return f"{self.url}/v1"

    def post(self, path: str, body: Json, *, api_key: str | None = None) -> tuple[int, Json]:
        """Status and body of the answer."""
        with _opened(self._request(path, body, api_key)) as answer:
            return answer.status, json.loads(answer.read())

    def get(self, path: str) -> Json:
        with _opened(self._request(path, None, None)) as answer:
            body: Json = json.loads(answer.read())
            return body

    def settled(self, path: str, **fields: Any) -> Json:
        """The answer once its prompt is in the prefix store, so that asking again gives the very same one."""
        body = {"model": self.model, **fields}
        for _ in range(2):
            status, answer = self.post(path, body)
            same(status, 200, f"status of {path}, which says {answer}")
        return answer

    def refusal(self, path: str, wanted: int, *, api_key: str | None = None, **fields: Any) -> Json:
        """The error object of an answer with status `wanted`. Raises LeftOut when the server has no reason for it."""
        status, answer = self.post(path, {"model": self.model, **fields}, api_key=api_key)
        if status == 200:
            raise LeftOut(f"no {wanted} from this server")
        same(status, wanted, f"status of {path}, which says {answer}")
        error: Json = answer["error"]
        return error

    def metrics(self) -> dict[str, float]:
        """By name without prefix, labels included."""
        with _opened(self._request("/metrics", None, None)) as answer:
            return {name: float(value) for name, value in _SAMPLE.findall(answer.read().decode())}

    def token_counts(self) -> TokenCounts:
        """Of a server that is idle: tokens are counted when their step has ended."""
        self.wait_until_idle()
        metrics = self.metrics()
        computed, cached, replayed = (
            metrics[f'prompt_tokens_total{{source="{source}"}}']
            for source in ("computed", "cached", "replayed")
        )
        return TokenCounts(computed, cached, replayed, metrics["generation_tokens_total"])

    def wait_until_idle(self) -> None:
        """Raises CheckFailed when requests are left."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            metrics = self.metrics()
            num_open = metrics["requests_running"] + metrics["requests_waiting"]
            if not num_open:
                return
            if time.monotonic() > deadline:
                raise CheckFailed(
                    f"{num_open:.0f} requests are open {IDLE_SECONDS:.0f} s after all clients left"
                )
            time.sleep(0.05)

    def _request(self, path: str, body: Json | None, api_key: str | None) -> urllib.request.Request:
        return urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "content-type": "application/json",
                "authorization": f"Bearer {self.api_key if api_key is None else api_key}",
            },
        )


def _opened(request: urllib.request.Request) -> Any:
    """An answer, also where its status tells an error."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return opener.open(request, timeout=ANSWER_SECONDS)
    except urllib.error.HTTPError as answer:
        return answer


Check = Callable[[Server], None]


def run_checks(checks: Sequence[tuple[str, Check]]) -> int:
    """All of them, also after one has failed. Returns the exit code."""
    url, model, api_key, tokenizer_dir = sys.argv[1:]
    server = Server(url, model, api_key, Path(tokenizer_dir))
    num_failed = 0
    for name, check in checks:
        try:
            check(server)
        except LeftOut as reason:
            _say(f"left out {name}: {reason}")
        except Exception as error:
            num_failed += 1
            _say(f"failed {name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        else:
            _say(f"checked {name}")
    return 1 if num_failed else 0


def _say(line: str) -> None:
    print(" ".join(line.split()), flush=True)


def same(got: object, wanted: object, what: str) -> None:
    """Raises CheckFailed with both."""
    if got != wanted:
        raise CheckFailed(f"{what} is {got!r} and should be {wanted!r}")


def some(value: object, what: str) -> None:
    """A comparison of two empty things shows nothing."""
    if not value:
        raise CheckFailed(f"{what} is {value!r}; there should be some")


def without(body: Json, *names: str) -> Json:
    return {name: value for name, value in body.items() if name not in names}


def raised(call: Callable[[], object], kind: type[Exception]) -> Any:
    """The error of exactly that class, which the call must raise."""
    try:
        answer = call()
    except Exception as error:
        if type(error) is not kind:
            raise CheckFailed(
                f"{type(error).__name__} instead of {kind.__name__}: {error}"
            ) from error
        return error
    raise CheckFailed(f"{answer!r} instead of {kind.__name__}")
