"""One call for all who ask while it is in flight."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Callers that arrive while a call is in flight wait for that one: a storm of probes is one query."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._in_flight: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._in_flight is None or self._in_flight.done():
            self._in_flight = asyncio.create_task(self._call())
        return await asyncio.shield(self._in_flight)
