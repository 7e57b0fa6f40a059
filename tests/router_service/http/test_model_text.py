"""What of a checkpoint the text side reads: whole, or refused by the name of the file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import CheckpointError
from router_service.model_text import load_model_text
from tests.router_service.http.helpers import DEMO_MODEL, VOCAB_SIZE

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def text_of(directory: Path) -> Path:
    """The demo model without its weights."""
    for name in FILES:
        shutil.copyfile(DEMO_MODEL / name, directory / name)
    return directory


def with_tokenizer(directory: Path, **changes: Any) -> Path:
    model = text_of(directory)
    values = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(values | changes))
    return model


def test_a_whole_model_is_read() -> None:
    text = load_model_text(DEMO_MODEL, VOCAB_SIZE)
    assert text.chat_template is not None
    assert text.defaults.temperature == 0.0
    assert text.codec.max_token_id < VOCAB_SIZE


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "null"])
def test_a_broken_tokenizer_is_refused_by_file(content: str, tmp_path: Path) -> None:
    model = text_of(tmp_path)
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_model_text(model, VOCAB_SIZE)


def test_a_missing_tokenizer_is_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_model_text(tmp_path, VOCAB_SIZE)


def test_a_decoder_that_is_not_byte_level_is_refused_by_name(tmp_path: Path) -> None:
    model = with_tokenizer(tmp_path, decoder={"type": "WordPiece", "prefix": "#", "cleanup": True})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder 'WordPiece'"):
        load_model_text(model, VOCAB_SIZE)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_with_both_numbers() -> None:
    largest = load_model_text(DEMO_MODEL, VOCAB_SIZE).codec.max_token_id
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.* id {largest}, .*{largest};"):
        load_model_text(DEMO_MODEL, largest)
    assert load_model_text(DEMO_MODEL, largest + 1).codec.max_token_id == largest


def test_an_added_token_counts_for_the_largest_id(tmp_path: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": VOCAB_SIZE, "content": "<extra>", "special": True, **flags}
    added = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["added_tokens"]
    model = with_tokenizer(tmp_path, added_tokens=[*added, token])
    codec = load_model_text(model, VOCAB_SIZE + 9).codec
    assert codec.max_token_id >= codec.encode("<extra>", add_special_tokens=False)[0]
