"""The picture of `bench prefix`: one bar per row, stacked from where its time to first token went."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from deploy.json_output import check_writable, refused

WIDTH_PIXELS = 1650
_DPI = 150
_MARGIN_INCHES = 1.6
"""Title, legend and the axis below."""
_INCHES_PER_BAR = 0.42
_PARTS = ("attention", "experts", "gate", "dispatch", "combine", "other", "control", "copy")


def height_pixels(num_rows: int) -> int:
    """Every bar has the same room, however many there are."""
    return round(_DPI * _height_inches(num_rows))


def check_drawable(file: Path | None) -> None:
    """Before any work is done for it. Raises ConfigError."""
    if file is None:
        return
    check_writable(file, "--png")
    try:
        import matplotlib  # noqa: F401  an optional extra, so not at the top
    except ImportError as error:
        raise ConfigError(
            f"--png {file} needs matplotlib: python -m pip install 'pointsman[bench]'"
        ) from error


def draw(rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Overwrites. Bars lie in the order of the rows, the median of the whole at their end. Raises ConfigError."""
    if file is None:
        return
    from matplotlib.figure import Figure  # as above

    size = WIDTH_PIXELS / _DPI, _height_inches(len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    names = [row["row"] for row in rows]
    ends = [0.0] * len(rows)
    for part in _PARTS:
        seconds = [row[f"{part}_seconds"] for row in rows]
        bars = axes.barh(names, seconds, left=ends, label=part)
        ends = [end + value for end, value in zip(ends, seconds, strict=True)]
    axes.bar_label(bars, labels=[f"{row['ttft_seconds_p50']:.3g}" for row in rows], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.07 * max(ends))
    axes.set_xlabel(
        "seconds to the first token: medians of the parts, and of the whole as a number"
    )
    axes.set_title(f"{rows[0]['ep_size']} ranks, {rows[0]['repeats']} repeats")
    figure.legend(loc="outside lower center", ncols=len(_PARTS), frameon=False)
    try:
        figure.savefig(file, format="png", dpi=_DPI)
    except OSError as error:
        raise refused(file, error, "--png") from error


def _height_inches(num_rows: int) -> float:
    return _MARGIN_INCHES + _INCHES_PER_BAR * num_rows
