"""One JSON object and one table for every bench: machine, command, rows."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from expert_workers.device import detect_devices, torch_version


def report(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": machine(), "command": shlex.join(["pointsman", *sys.argv[1:]]), "rows": rows}


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers, the load of others included."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch_version(),
        "gpus": detect_devices().count,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "no rows"
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
