"""The picture of `bench prefix`, from rows that nobody had to measure."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from cluster.errors import ConfigError
from deploy.bench import chart

PARTS = ("attention", "experts", "gate", "dispatch", "combine", "other", "control", "copy")


def make_row(name: str, seconds: float) -> dict[str, Any]:
    """A part takes `seconds` each."""
    parts = {f"{part}_seconds": seconds for part in PARTS}
    return {"row": name, "ep_size": 4, "repeats": 3, "ttft_seconds_p50": 8 * seconds, **parts}


def png_size(file: Path) -> tuple[int, int]:
    """Width and height in pixels, of the file's first chunk."""
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert head[12:16] == b"IHDR"
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize("num_rows", [1, 8, 10])
def test_a_picture_is_a_png_with_the_same_room_for_every_bar(tmp_path: Path, num_rows: int) -> None:
    file = tmp_path / "prefix.png"
    chart.draw([make_row(f"row_{n}", 0.1 * (n + 1)) for n in range(num_rows)], file)
    assert png_size(file) == (1650, 240 + 63 * num_rows)


def test_no_bar_hides_another_and_lengths_are_seconds(tmp_path: Path) -> None:
    """The first part's colour, row of pixels by row: as many runs as bars, each as long as its seconds."""
    file = tmp_path / "prefix.png"
    seconds = [0.4, 0.1, 0.2, 0.4, 0.3, 0.1, 0.2, 0.3, 0.4, 0.1]
    chart.draw([make_row(f"replay_planned_{n}", s) for n, s in enumerate(seconds)], file)
    blue = (np.abs(imread(file)[..., :3] - [31 / 255, 119 / 255, 180 / 255]) < 0.01).all(-1)
    above_the_legend = blue.sum(axis=1)[:-100]
    edges = np.flatnonzero(np.diff((above_the_legend > 0).astype(int)))
    bars = edges.reshape(-1, 2)
    assert len(bars) == len(seconds)
    middles = above_the_legend[bars.mean(axis=1).astype(int)]
    np.testing.assert_allclose(middles / middles.max(), np.array(seconds) / 0.4, atol=0.03)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--png .*: No such file"):
        chart.draw([make_row("cold", 0.1)], tmp_path / "nowhere" / "prefix.png")
