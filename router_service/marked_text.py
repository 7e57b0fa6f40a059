"""Markers in a growing text."""


def num_pending(text: str, marker: str) -> int:
    """Characters at the end of `text` that are a proper beginning of the marker, 0 if none."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
