"""Seeded workloads as pure functions over plain data: what is asked, not when or how.

Everything follows from a shape, a seed and a number, so that any number of users together ask the same things as one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

TEMPLATE_TOKENS_PER_MESSAGE = 16
"""More than a chat template adds to a message (role, separators), and more than what it ends a prompt with."""

_SYSTEM_PROMPTS = (
    "You are a helpful assistant. Answer in short sentences.",
    "You are a teacher of small children. Be friendly and patient.",
    "You are a storyteller. Tell things as they might have happened long ago.",
)
_QUESTIONS = (
    "Tell me a story about {thing}.",
    "What can you say about {thing}?",
    "Why is {thing} in the story?",
    "Tell me more about {thing} and {other}.",
    "Which is larger, {thing} or {other}?",
    "What did {thing} do next?",
    "Tell me a joke about {thing}.",
)
_THINGS = (
    "a dragon", "the brave owl", "a small ship", "the moon", "an old king", "the river", "a horse", "Norway",
    "the seven days", "a drum", "the shepherd", "a clever fox", "winter", "the library", "a lamp", "the garden",
)  # fmt: skip


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class ChatShape:
    """Raises ValueError when not even a first question fits the context."""

    num_turns: int = 6
    max_tokens: int = 48
    """Of each answer."""
    context_tokens: int = 4096

    def __post_init__(self) -> None:
        _at_least_one(num_turns=self.num_turns, max_tokens=self.max_tokens)
        longest = _most_tokens(
            (Message("system", max(_SYSTEM_PROMPTS, key=len)), Message("user", _longest_question()))
        )
        _must_fit("a first question", longest + self.max_tokens, self.context_tokens)


@dataclass(frozen=True)
class Conversation:
    """One turn of it: `messages` end with what the user asks now, `questions` come after it."""

    shape: ChatShape
    messages: tuple[Message, ...]
    questions: tuple[str, ...]

    def after(self, answer: str) -> "Conversation | None":
        """The next turn: this one, its answer and the next question. None when all is asked or it might not fit."""
        if not self.questions:
            return None
        question, *rest = self.questions
        following = (*self.messages, Message("assistant", answer), Message("user", question))
        if _most_tokens(following) + self.shape.max_tokens > self.shape.context_tokens:
            return None
        return replace(self, messages=following, questions=tuple(rest))

    @property
    def most_prompt_tokens(self) -> int:
        """No tokenizer over bytes makes more of it."""
        return _most_tokens(self.messages)


def conversation(shape: ChatShape, seed: int, number: int) -> Conversation:
    """The first turn of conversation `number`."""
    draw = random.Random(f"chat {seed} {number}")
    first, *rest = (_question(draw) for _ in range(shape.num_turns))
    system = draw.choice(_SYSTEM_PROMPTS)
    return Conversation(shape, (Message("system", system), Message("user", first)), tuple(rest))


def _question(draw: random.Random) -> str:
    thing, other = draw.sample(_THINGS, 2)
    return draw.choice(_QUESTIONS).format(thing=thing, other=other)


def _longest_question() -> str:
    longest = max(_THINGS, key=len)
    return max((q.format(thing=longest, other=longest) for q in _QUESTIONS), key=len)


def _most_tokens(messages: Sequence[Message]) -> int:
    """A token stands for one byte at least."""
    num_bytes = sum(len(message.content.encode()) for message in messages)
    return num_bytes + TEMPLATE_TOKENS_PER_MESSAGE * (len(messages) + 1)


@dataclass(frozen=True)
class SharedPrefixShape:
    """A few long system prompts, rank i asked for in proportion to 1 / i ** zipf_exponent, with many short tails.

    Token ids are drawn from `[lowest_token_id, vocab_size)`; below are a tokenizer's special tokens. Raises ValueError
    when a request cannot fit the context.
    """

    num_prefixes: int = 4
    prefix_tokens: int = 1024
    min_tail_tokens: int = 8
    max_tail_tokens: int = 32
    max_tokens: int = 16
    """Of each answer."""
    zipf_exponent: float = 1.0
    lowest_token_id: int = 16
    vocab_size: int = 3000
    context_tokens: int = 4096

    def __post_init__(self) -> None:
        _at_least_one(
            num_prefixes=self.num_prefixes,
            prefix_tokens=self.prefix_tokens,
            min_tail_tokens=self.min_tail_tokens,
            max_tokens=self.max_tokens,
        )
        if self.min_tail_tokens > self.max_tail_tokens:
            raise ValueError(
                f"min_tail_tokens is {self.min_tail_tokens}, over max_tail_tokens, {self.max_tail_tokens}"
            )
        check_token_ids(self.lowest_token_id, self.vocab_size)
        longest = self.prefix_tokens + self.max_tail_tokens + self.max_tokens
        _must_fit("the longest request", longest, self.context_tokens)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of all requests, by prefix; they sum to 1."""
        weights = [1 / (i + 1) ** self.zipf_exponent for i in range(self.num_prefixes)]
        return tuple(weight / sum(weights) for weight in weights)


@dataclass(frozen=True)
class PromptRequest:
    """A completion of token ids that generates exactly `num_output_tokens`."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


def prefix_of_request(shape: SharedPrefixShape, seed: int, number: int) -> int:
    """Which of the prefixes request `number` has; 0 is the most popular."""
    draw = random.Random(f"popularity {seed} {number}")
    return draw.choices(range(shape.num_prefixes), weights=shape.shares)[0]


def shared_prefix_request(shape: SharedPrefixShape, seed: int, number: int) -> PromptRequest:
    prefix = prefix_of_request(shape, seed, number)
    tail = random.Random(f"tail {seed} {number}")
    num_tail_tokens = tail.randint(shape.min_tail_tokens, shape.max_tail_tokens)
    prompt = (
        *_token_ids(random.Random(f"prefix {seed} {prefix}"), shape, shape.prefix_tokens),
        *_token_ids(tail, shape, num_tail_tokens),
    )
    return PromptRequest(prompt, shape.max_tokens)


def _token_ids(draw: random.Random, shape: SharedPrefixShape, num: int) -> tuple[int, ...]:
    return tuple(draw.randrange(shape.lowest_token_id, shape.vocab_size) for _ in range(num))


def check_token_ids(lowest_token_id: int, vocab_size: int) -> None:
    """Raises ValueError when there is none in `[lowest_token_id, vocab_size)`."""
    if not 0 <= lowest_token_id < vocab_size:
        raise ValueError(f"no token id from {lowest_token_id} on, the vocabulary has {vocab_size}")


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def _must_fit(what: str, num_tokens: int, context_tokens: int) -> None:
    if num_tokens > context_tokens:
        raise ValueError(
            f"{what} may need {num_tokens} tokens, the context has {context_tokens}: ask for less"
        )
