from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deploy
from loadtest.workload import (
    ChatShape,
    Conversation,
    Message,
    SharedPrefixShape,
    conversation,
    prefix_of_request,
    shared_prefix_request,
)
from router_service.chat_template import ChatTemplate, load_chat_template
from router_service.tokenizer import TextCodec

DEMO_MODEL = Path(deploy.__file__).parent / "demo_model"
SEEDS = st.integers(0, 2**32)
NUMBERS = st.integers(0, 10_000)
CHAT_SHAPES = st.builds(
    ChatShape,
    num_turns=st.integers(1, 12),
    max_tokens=st.integers(1, 64),
    context_tokens=st.integers(300, 2000),
)
PREFIX_SHAPES = st.builds(
    SharedPrefixShape,
    num_prefixes=st.integers(1, 6),
    prefix_tokens=st.integers(1, 80),
    min_tail_tokens=st.integers(1, 8),
    max_tail_tokens=st.integers(8, 20),
    max_tokens=st.integers(1, 20),
    zipf_exponent=st.floats(0, 3),
    context_tokens=st.integers(120, 200),
)


def turns(first: Conversation, answers: list[str]) -> list[Conversation]:
    """As far as the answers and the conversation go."""
    played: list[Conversation] = [first]
    for answer in answers:
        following = played[-1].after(answer)
        if following is None:
            return played
        played.append(following)
    return played


@settings(derandomize=True, deadline=None)
@given(CHAT_SHAPES, SEEDS, NUMBERS)
def test_same_seed_and_number_is_the_same_conversation(
    shape: ChatShape, seed: int, number: int
) -> None:
    assert conversation(shape, seed, number) == conversation(shape, seed, number)


def test_other_seeds_and_other_numbers_are_other_conversations() -> None:
    several = {conversation(ChatShape(), seed, n) for seed in range(5) for n in range(20)}
    assert len(several) > 95


@settings(derandomize=True, deadline=None)
@given(CHAT_SHAPES, SEEDS, st.lists(st.text(max_size=300), max_size=12))
def test_a_turn_is_the_one_before_it_with_answer_and_question(
    shape: ChatShape, seed: int, answers: list[str]
) -> None:
    played = turns(conversation(shape, seed, 0), answers)
    for before, after, answer in zip(played, played[1:], answers, strict=False):
        assert after.messages[:-2] == before.messages
        assert after.messages[-2] == Message("assistant", answer)
        assert after.messages[-1].role == "user"
    assert len(played) <= shape.num_turns


def test_short_answers_let_a_conversation_have_all_its_turns() -> None:
    shape = ChatShape(num_turns=7, context_tokens=4096)
    assert len(turns(conversation(shape, 1, 2), ["Yes."] * 20)) == 7


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(DEMO_MODEL)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    template = load_chat_template(DEMO_MODEL)
    assert template is not None
    return template


@settings(derandomize=True, deadline=None)
@given(CHAT_SHAPES, SEEDS, st.lists(st.text(max_size=300), max_size=12))
def test_no_turn_with_its_answer_is_longer_than_the_context(
    codec: TextCodec, template: ChatTemplate, shape: ChatShape, seed: int, answers: list[str]
) -> None:
    for turn in turns(conversation(shape, seed, 0), answers):
        messages: list[dict[str, Any]] = [
            {"role": m.role, "content": m.content} for m in turn.messages
        ]
        prompt = codec.encode(template.render(messages), add_special_tokens=False)
        assert len(prompt) <= turn.most_prompt_tokens <= shape.context_tokens - shape.max_tokens


def test_a_context_without_room_for_a_question_is_refused() -> None:
    with pytest.raises(ValueError, match="the context has 100"):
        ChatShape(context_tokens=100)


@settings(derandomize=True, deadline=None)
@given(PREFIX_SHAPES, SEEDS, NUMBERS)
def test_same_seed_and_number_is_the_same_request(
    shape: SharedPrefixShape, seed: int, number: int
) -> None:
    request = shared_prefix_request(shape, seed, number)
    assert request == shared_prefix_request(shape, seed, number)


@settings(derandomize=True, deadline=None)
@given(PREFIX_SHAPES, SEEDS, NUMBERS)
def test_a_request_has_the_lengths_and_token_ids_that_were_asked_for(
    shape: SharedPrefixShape, seed: int, number: int
) -> None:
    request = shared_prefix_request(shape, seed, number)
    num_tail_tokens = len(request.prompt_token_ids) - shape.prefix_tokens
    assert shape.min_tail_tokens <= num_tail_tokens <= shape.max_tail_tokens
    assert len(request.prompt_token_ids) + request.num_output_tokens <= shape.context_tokens
    assert min(request.prompt_token_ids) >= shape.lowest_token_id
    assert max(request.prompt_token_ids) < shape.vocab_size


def test_requests_share_a_prefix_and_nothing_else() -> None:
    shape = SharedPrefixShape(prefix_tokens=64, min_tail_tokens=8)
    requests = [shared_prefix_request(shape, 3, n).prompt_token_ids for n in range(200)]
    prefixes = {request[:64] for request in requests}
    tails = {request[64:72] for request in requests}
    assert (len(prefixes), len(tails)) == (shape.num_prefixes, 200)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_prefixes_are_as_popular_as_asked(exponent: float) -> None:
    shape = SharedPrefixShape(num_prefixes=5, zipf_exponent=exponent)
    num_requests = 4000
    asked = Counter(prefix_of_request(shape, 11, n) for n in range(num_requests))
    shares = [asked[prefix] / num_requests for prefix in range(5)]
    assert shares == pytest.approx(shape.shares, abs=0.03)
    assert shape.shares[0] / shape.shares[4] == pytest.approx(5**exponent)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefix_tokens": 4090}, "the context has 4096"),
        ({"num_prefixes": 0}, "num_prefixes is 0"),
        ({"min_tail_tokens": 33}, "over max_tail_tokens"),
        ({"vocab_size": 16}, "no token id from 16 on"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedPrefixShape(**fields)
