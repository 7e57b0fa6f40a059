"""A few requests whose answers must be the same whenever the same weights are asked, whatever goes on beside them."""

import threading
from typing import Any

import httpx

from tests.integration.api import random_prompt
from tests.soak.asks import MODEL
from tests.soak.clients import Tally

_LONG, _SHORT = random_prompt(501, 200), random_prompt(502, 33)
_FUNCTION = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"of": {"enum": ["a", "b"]}}},
}
_QUESTION = [{"role": "user", "content": "Tell me a story about the brave owl."}]


def _completion(prompt: list[int], **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    return "/v1/completions", body | {"return_token_ids": True, "ignore_eos": True} | fields


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "messages": _QUESTION, "max_tokens": 16, "temperature": 0}
    return "/v1/chat/completions", body | {"return_token_ids": True} | fields


PROBES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": _completion(_LONG, logprobs=2),
    "choices": _completion(_LONG, n=3, temperature=1, seed=7),
    "echo": _completion(_SHORT, echo=True, logprobs=3, max_tokens=1),
    "prompt log-probs": _completion(_LONG, prompt_logprobs=1),
    "routes": _completion(_SHORT, return_routed_experts="weights"),
    "rules": _completion(_SHORT, frequency_penalty=1, repetition_penalty=1.2, max_tokens=24),
    "grammar": _completion(_SHORT, ignore_eos=False, structured_outputs={"regex": "[a-z ]{8,12}"}),
    "call": _chat(tools=[{"type": "function", "function": _FUNCTION}], tool_choice="required"),
}


class Prober:
    """Owner of the first answer to each probe, by weights. All that comes later has to equal it."""

    def __init__(self, base_url: str, key: str, tally: Tally) -> None:
        self._base_url = base_url
        self._headers = {"authorization": f"Bearer {key}"}
        self._tally = tally
        self._first: dict[tuple[str, str], Any] = {}
        self.num_same = 0
        self.different: list[str] = []

    def run(self, stop: threading.Event, seconds_between: float) -> None:
        while not stop.is_set():
            self.probe()
            stop.wait(seconds_between)

    def probe(self) -> None:
        for name, (path, body) in PROBES.items():
            with httpx.Client(timeout=120.0, headers=self._headers) as http:
                answer = http.post(f"{self._base_url}{path}", json=body)
            if answer.status_code == 200:
                self._compare(name, answer.json())
            elif answer.status_code not in (429, 503):
                self._tally.fail(f"probe {name}", f"{answer.status_code} {answer.text[:300]}")

    @property
    def num_weights(self) -> int:
        return len({version for _, version in self._first})

    def _compare(self, name: str, answer: dict[str, Any]) -> None:
        version, said = answer["weight_version"], _said(answer)
        first = self._first.setdefault((name, version), said)
        if first == said:
            self.num_same += 1
        else:
            self.different.append(f"{name} of {version}: {said}, at first {first}"[:1000])


def _said(answer: dict[str, Any]) -> Any:
    """Without what is another one's each time: ids, times, and where the prompt came from."""
    choices = answer["choices"]
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return choices
