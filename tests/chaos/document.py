"""A document of several sections, each written by a run of its own."""

import re
from collections.abc import Sequence
from pathlib import Path

HEAD = "# Killed and frozen processes"


def write_section(path: Path, heading: str, lines: Sequence[str]) -> None:
    """In place of the section of that heading, or at the end; the others stay."""
    text = path.read_text() if path.exists() else f"{HEAD}\n"
    path.write_text(with_section(text, heading, lines))


def with_section(text: str, heading: str, lines: Sequence[str]) -> str:
    """heading: without its ##."""
    section = "\n".join([f"## {heading}", "", *lines, ""])
    old = re.compile(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if old.search(text) is None:
        return f"{text.rstrip()}\n\n{section}"
    return old.sub(lambda match: section + ("\n" if match.end() < len(text) else ""), text)
