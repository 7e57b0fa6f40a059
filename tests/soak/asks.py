"""What the clients of a soak ask for: a function of the seed and the number of a request, and of a row of the trace."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from loadtest.workload import ChatShape, PromptRequest, conversation

MODEL = "minnow"
CONTEXT_TOKENS = 1024
TENANTS = ("red", "green", "blue")
LEAVING_SHARE = 0.2
"""Of all clients: before anything came, or in the middle of a stream."""
MAX_SILENT_SECONDS = 0.4
Body = dict[str, Any]
_CHAT = ChatShape(num_turns=3, max_tokens=24, context_tokens=CONTEXT_TOKENS)


@dataclass(frozen=True)
class Ask:
    """One request. is_refused: it has to be a 4xx. leaves_after_seconds: if nothing has come by then;
    leaves_after_events: of its stream."""

    kind: str
    path: str
    body: Body
    tenant: str
    is_refused: bool = False
    leaves_after_seconds: float | None = None
    leaves_after_events: int | None = None

    @property
    def leaves(self) -> bool:
        return self.leaves_after_seconds is not None or self.leaves_after_events is not None


@dataclass(frozen=True)
class _Draw:
    """What a kind makes its body of."""

    dice: random.Random
    number: int
    request: PromptRequest

    def completion(self, **fields: Any) -> Body:
        return {
            "model": MODEL,
            "prompt": list(self.request.prompt_token_ids),
            "max_tokens": self.request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        } | fields

    def chat(self, **fields: Any) -> Body:
        said = conversation(_CHAT, 0, self.dice.randrange(500)).messages
        messages = [{"role": m.role, "content": m.content} for m in said]
        return {"model": MODEL, "messages": messages, "max_tokens": 24} | fields

    def word(self, length: int = 8) -> str:
        return "".join(self.dice.choices(string.ascii_lowercase, k=length))

    def coin(self) -> bool:
        return self.dice.random() < 0.5


def ask_of(seed: int, number: int, request: PromptRequest) -> Ask:
    """request: what the trace asks for next."""
    dice = random.Random(f"ask {seed} {number}")
    kind = dice.choices(_KINDS, weights=[kind.share for kind in _KINDS])[0]
    ask = kind.ask(_Draw(dice, number, request))
    ask = replace(ask, tenant=dice.choice(TENANTS), body=_salted(ask, dice, number))
    return _leaving(ask, dice)


def _salted(ask: Ask, dice: random.Random, number: int) -> Body:
    """Most have none, some one of a few, some one of their own."""
    salt = dice.choices(
        (None, f"salt {dice.randrange(8)}", f"salt of {number}"), weights=(6, 3, 1)
    )[0]
    if salt is None or ask.is_refused or not ask.path.endswith("completions"):
        return ask.body
    return ask.body | {"cache_salt": salt}


def _leaving(ask: Ask, dice: random.Random) -> Ask:
    if ask.is_refused or dice.random() >= LEAVING_SHARE:
        return ask
    if ask.body.get("stream") and dice.random() < 0.5:
        return replace(ask, leaves_after_events=dice.randint(1, 6))
    return replace(ask, leaves_after_seconds=dice.uniform(0.01, MAX_SILENT_SECONDS))


@dataclass(frozen=True)
class _Kind:
    share: float
    name: str
    path: str
    body: Callable[[_Draw], Body]
    is_refused: bool = False

    def ask(self, draw: _Draw) -> Ask:
        path = self.path.format(word=draw.word())
        return Ask(self.name, path, self.body(draw), "", self.is_refused)


def _choices(draw: _Draw) -> Body:
    return draw.completion(
        n=draw.dice.randint(2, 4), temperature=1, seed=draw.number, stream=draw.coin()
    )


def _scores(draw: _Draw) -> Body:
    """As evaluations send them."""
    return draw.completion(
        echo=True, logprobs=draw.dice.randint(0, 5), max_tokens=draw.dice.choice((0, 1, 4))
    )


def _routes(draw: _Draw) -> Body:
    asked = draw.dice.choice((True, "weights"))
    return draw.completion(
        return_routed_experts=asked, return_token_ids=True, stream=draw.coin(), logprobs=1
    )


def _rules(draw: _Draw) -> Body:
    """Everything that looks back at the tokens before."""
    return draw.completion(
        temperature=0.8,
        seed=draw.number,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={str(draw.dice.randrange(16, 3000)): -5},
        stop=[draw.word(2), draw.word(3)],
        min_tokens=2,
        max_tokens=draw.request.num_output_tokens + 4,
        bad_words=[draw.word(4)],
        priority=draw.dice.randint(-2, 2),
        stream=True,
    )


def _regex(draw: _Draw) -> Body:
    """A few that come again and many that do not."""
    many = draw.dice.randrange(2000)
    pattern = "[a-z]{4,8}" if draw.coin() else f"(yes|no) [0-9]{{2}} {many}"
    return draw.completion(ignore_eos=False, structured_outputs={"regex": pattern}, stream=True)


def _schema(draw: _Draw) -> Body:
    properties = {draw.word(3): {"type": "integer"} for _ in range(draw.dice.randint(1, 3))}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return draw.chat(response_format=form, stream=draw.coin())


def _calls(draw: _Draw) -> Body:
    name = draw.dice.choice(("look_up", "add", f"call_{draw.dice.randrange(300)}"))
    parameters = {"type": "object", "properties": {"of": {"enum": ["a", "b"]}}, "required": ["of"]}
    function = {"name": name, "description": "does it", "parameters": parameters}
    return draw.chat(
        tools=[{"type": "function", "function": function}],
        tool_choice=draw.dice.choice(("auto", "required")),
        stream=draw.coin(),
    )


def _response(draw: _Draw) -> Body:
    return {
        "model": MODEL,
        "input": f"Tell me of {draw.word()}.",
        "max_output_tokens": 16,
        "stream": draw.coin(),
        "store": False,
    }


def _message(draw: _Draw) -> Body:
    messages = [{"role": "user", "content": f"Tell me of {draw.word()}."}]
    return {"model": MODEL, "messages": messages, "max_tokens": 16, "stream": draw.coin()}


_KINDS = (
    _Kind(6.0, "streams", "/v1/completions", lambda draw: draw.completion(stream=True)),
    _Kind(2.0, "choices", "/v1/completions", _choices),
    _Kind(2.0, "echoes with log-probs", "/v1/completions", _scores),
    _Kind(1.0, "prompt log-probs", "/v1/completions", lambda d: d.completion(prompt_logprobs=2)),
    _Kind(2.0, "routes", "/v1/completions", _routes),
    _Kind(1.5, "penalties, stops, priorities", "/v1/completions", _rules),
    _Kind(1.0, "regular expressions", "/v1/completions", _regex),
    _Kind(1.0, "JSON schemas", "/v1/chat/completions", _schema),
    _Kind(1.5, "tool calls", "/v1/chat/completions", _calls),
    _Kind(2.0, "chats", "/v1/chat/completions", lambda d: d.chat(stream=True, temperature=1)),
    _Kind(0.5, "responses", "/v1/responses", _response),
    _Kind(0.5, "messages", "/v1/messages", _message),
    _Kind(0.5, "tokenize", "/tokenize", lambda d: {"model": MODEL, "prompt": d.word(2000)}),
    _Kind(
        0.4,
        "unknown models",
        "/v1/completions",
        lambda draw: draw.completion(model=draw.word(20)),
        is_refused=True,
    ),
    _Kind(
        0.4,
        "prompts that are too long",
        "/v1/completions",
        lambda draw: draw.completion(prompt=draw.word(200_000)),
        is_refused=True,
    ),
    _Kind(
        0.4,
        "grammars that are none",
        "/v1/completions",
        lambda draw: draw.completion(ignore_eos=False, guided_regex=f"({draw.word()}"),
        is_refused=True,
    ),
    _Kind(0.3, "unknown paths", "/v1/{word}", lambda draw: {draw.word(): 1}, is_refused=True),
)
