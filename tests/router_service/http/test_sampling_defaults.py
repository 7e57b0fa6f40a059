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
        ({"do_sample": True, "top_k": 20}, SamplingDefaults(1.0, 1.0)),
    ],
)
def test_the_checkpoint_s_generation_config_sets_the_defaults(
    config: dict[str, Any], expected: SamplingDefaults, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert load_sampling_defaults(tmp_path) == expected


def test_without_the_file_openai_s_defaults_hold(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(1.0, 1.0)


@pytest.mark.parametrize("text", ["[]", "{", '{"temperature": "hot"}', '{"top_p": 2}'])
def test_a_broken_file_is_a_checkpoint_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_sampling_defaults(tmp_path)
