"""The picture of `bench prefix`: one bar per row, stacked from where its time to first token went."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from deploy.json_output import check_writable, refused

_PARTS = ("attention", "experts", "gate", "dispatch", "combine", "other", "control", "copy")


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
    """Overwrites. Raises ConfigError."""
    if file is None:
        return
    from matplotlib.figure import Figure  # as above

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    names = [row["row"] for row in rows]
    bottoms = [0.0] * len(rows)
    for part in _PARTS:
        seconds = [row[f"{part}_seconds"] for row in rows]
        axes.bar(names, seconds, bottom=bottoms, label=part)
        bottoms = [bottom + value for bottom, value in zip(bottoms, seconds, strict=True)]
    axes.set_ylabel("seconds to the first token (medians of the parts)")
    axes.set_title(f"{rows[0]['ep_size']} ranks, {rows[0]['repeats']} repeats")
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend()
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as error:
        raise refused(file, error, "--png") from error
