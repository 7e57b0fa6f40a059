"""Questions to the engine and their answers, each by its number, each with a deadline."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cluster.errors import CellError, ConflictError, DeadlineError, PointsmanError, RequestError
from cluster.messages import (
    CellStatus,
    EvictReport,
    FeaturesReport,
    MetricsText,
    ToEngine,
    WeightsRefused,
    WeightsUpdated,
)

Answer = MetricsText | CellStatus | EvictReport | FeaturesReport | WeightsUpdated | WeightsRefused
A = TypeVar("A", MetricsText, CellStatus, EvictReport, FeaturesReport, WeightsUpdated)


class Queries:
    """Owner of those that are not answered yet."""

    def __init__(self, send: Callable[[ToEngine], Awaitable[None]], endpoint: str) -> None:
        self._send = send
        self._endpoint = endpoint
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count(1)

    async def ask(self, question: Callable[[int], ToEngine], kind: type[A], seconds: float) -> A:
        """Raises CellError, DeadlineError; of weights that are refused RequestError, ConflictError."""
        query_id = next(self._ids)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[query_id] = answer
        try:
            await self._send(question(query_id))
            async with asyncio.timeout(seconds):
                result = await answer
        except TimeoutError as error:
            raise DeadlineError(
                f"the engine at {self._endpoint} did not answer within {seconds:g} s"
            ) from error
        finally:
            del self._pending[query_id]
        if isinstance(result, WeightsRefused):
            raise _weights_refusal(result)
        if not isinstance(result, kind):
            raise CellError(f"the engine answered query {query_id} with {type(result).__name__}")
        return result

    def take(self, answer: Answer) -> None:
        pending = self._pending.get(answer.query_id)
        if pending is not None and not pending.done():
            pending.set_result(answer)

    def fail(self, error: PointsmanError) -> None:
        """All that are not answered yet."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)


def _weights_refusal(refused: WeightsRefused) -> PointsmanError:
    match refused.kind:
        case "invalid":
            return RequestError(refused.reason, field="model_dir")
        case "conflict":
            return ConflictError(refused.reason)
        case "unavailable":
            return CellError(refused.reason)
