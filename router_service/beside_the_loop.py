"""Work of many small steps in Python that would hold up the event loop: on a thread once it is long."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MAX_ITEMS_ON_THE_LOOP = 2048
"""Tokens or the like, at some microseconds each."""


async def beside_the_loop(num_items: int, work: Callable[[], T]) -> T:
    """The result of `work`. On a thread other tasks go on: the interpreter changes threads every few milliseconds."""
    return work() if num_items <= MAX_ITEMS_ON_THE_LOOP else await asyncio.to_thread(work)
