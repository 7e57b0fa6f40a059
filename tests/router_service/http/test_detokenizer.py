import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.router_service.http.helpers import CODEC, DEMO_MODEL, VOCAB_SIZE, tokens

REFERENCE = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
CHARACTERS = ["🙂", "👨‍👩‍👧", "漢字", "é", "한국어", "नमस्ते"]


def pieces(token_ids: list[int]) -> list[str]:
    detokenizer = CODEC.detokenizer()
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE + 10), max_size=40))
def test_joined_pieces_equal_the_decode_of_all_ids(token_ids: list[int]) -> None:
    assert "".join(pieces(token_ids)) == REFERENCE.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.text(max_size=40))
def test_text_survives_the_round_trip(text: str) -> None:
    without_special = text.replace("<", "")
    assert "".join(pieces(tokens(without_special))) == without_special


@pytest.mark.parametrize("text", CHARACTERS)
def test_no_piece_holds_half_a_character(text: str) -> None:
    assert not [piece for piece in pieces(tokens(text)) if "�" in piece]


@pytest.mark.parametrize("text", CHARACTERS)
def test_an_output_cut_inside_a_character_flushes_its_tail_once_at_the_end(text: str) -> None:
    token_ids = tokens(text)[:-1]
    made = pieces(token_ids)
    assert not [piece for piece in made[:-1] if "�" in piece]
    assert "".join(made) == REFERENCE.decode(token_ids, skip_special_tokens=True)


def test_special_tokens_and_padding_ids_leave_no_text() -> None:
    assert pieces([1, 2, 0, VOCAB_SIZE + 7]) == ["", "", "", "", ""]
