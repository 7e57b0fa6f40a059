"""The process that compiles grammars: what becomes of questions when it ends."""

import asyncio
import json

from cluster.errors import CellError
from router_service.grammar_checks import GrammarChecks
from router_service.grammar_child import Vocabulary
from router_service.requested_grammar import GrammarSource
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

VOCABULARY = Vocabulary(str(DEMO_MODEL_DIR), 3072, (2, 0))
BOMB = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(30)]}


def test_closing_ends_the_grammar_that_is_compiled_and_fails_those_that_wait() -> None:
    async def closed_while_asked(checks: GrammarChecks) -> list[object]:
        await checks.checked(GrammarSource("guided_regex", "regex", "a"))
        bombs = [GrammarSource("f", "json", json.dumps(BOMB | {"minLength": n})) for n in range(3)]
        asked = [asyncio.create_task(checks.checked(bomb)) for bomb in bombs]
        await asyncio.sleep(0)  # they are asked now
        checks.close()
        async with asyncio.timeout(20):
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(closed_while_asked(GrammarChecks(VOCABULARY)))
    assert [type(answer) for answer in answers] == [CellError] * 3
