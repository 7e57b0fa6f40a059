import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import CheckpointError
from router_service.sampling_defaults import SamplingDefaults, load_sampling_defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults(1.0, 1.0)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(0.0, 1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, SamplingDefaults(0.6, 0.95)),
        ({"temperature": 0.6}, SamplingDefaults(0.6, 1.0)),
        ({"top_p": 1, "temperature": 0}, SamplingDefaults(0.0, 1.0)),
        ({"temperature": None, "top_p": None, "do_sample": None}, SamplingDefaults(1.0, 1.0)),
        ({"top_k": 20, "min_p": 0.1}, SamplingDefaults(1.0, 1.0, 20, 0.1)),
        ({"top_k": 0, "min_p": 0}, SamplingDefaults(1.0, 1.0, None, 0.0)),
        ({"top_k": -1, "min_p": None}, SamplingDefaults(1.0, 1.0, None, 0.0)),
        ({"repetition_penalty": 1.05}, SamplingDefaults(repetition_penalty=1.05)),
        ({"repetition_penalty": None}, SamplingDefaults()),
    ],
)
def test_the_checkpoint_s_generation_config_sets_the_defaults(
    config: dict[str, Any], expected: SamplingDefaults, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert load_sampling_defaults(tmp_path) == expected


def test_without_the_file_openai_s_defaults_hold(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(1.0, 1.0)


@pytest.mark.parametrize("text", ["[]", "{", "", "[" * 100_000, '{"a": "\\'])
def test_a_broken_file_is_a_checkpoint_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in ("hot", -0.1, 2.5, True, [], float("nan"))),
        *(("top_p", value) for value in (0, 0.0, -1, 1.5, "1", False, float("nan"))),
        *(("top_k", value) for value in (-2, 20.0, "5", True, [])),
        *(("min_p", value) for value in (-0.1, 1.5, "0", False, float("nan"))),
        *(("repetition_penalty", value) for value in (0, -1.1, 101, "1", True, float("nan"))),
        *(("do_sample", value) for value in (0, 1, "false", [])),
    ],
)
def test_a_value_out_of_range_is_refused_by_file_name_and_value(
    name: str, value: Any, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError) as refused:
        load_sampling_defaults(tmp_path)
    assert f"generation_config.json: {name} = {value!r} is not" in str(refused.value)


def test_settings_that_are_not_applied_are_named_in_one_line(tmp_path: Path) -> None:
    config = {"typical_p": 0.9, "num_beams": 4, "min_length": 5, "temperature": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    defaults = load_sampling_defaults(tmp_path)
    assert defaults.temperature == 0.5
    assert defaults.warning == (
        "generation_config.json: not applied: typical_p=0.9, min_length=5, num_beams=4"
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "typical_p": 1.0, "num_beams": 1},
        {"top_k": None, "bad_words_ids": None, "suppress_tokens": []},
        {"max_new_tokens": 256, "transformers_version": "5.0.0", "eos_token_id": [2, 0]},
    ],
)
def test_settings_that_change_nothing_need_no_warning(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert load_sampling_defaults(tmp_path).warning is None
