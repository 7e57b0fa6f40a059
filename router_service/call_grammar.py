"""A grammar of an answer that has to be calls, as text in llguidance's Lark. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.grammar import BLANKS
from router_service.reasoning import ReasoningStart
from router_service.reasoning_grammar import ReasoningGrammar, literal
from router_service.template_probes import PROBE_CALL_ID
from router_service.tool_calls.call_format import CallLayout

_ID_MEMBER = re.compile(rf'(,\s*"id":\s*"{PROBE_CALL_ID}")')
"""Shown of calls that are over and have an id. Whoever writes one need not."""
_ID = f"/[a-zA-Z0-9]{{{len(PROBE_CALL_ID)}}}/"
_BLANKS = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": BLANKS}}


@dataclass(frozen=True)
class CallGrammar:
    """token_ids: of tokens that are never cut, by their text; reasoning: what comes before the calls, None: nothing."""

    layout: CallLayout
    token_ids: Mapping[str, int]
    reasoning: ReasoningStart | None

    def text(self, schemas: Mapping[str, dict[str, Any]], *, is_repeated: bool) -> str:
        """One call of one of these functions, whose arguments match its schema; is_repeated: or several calls."""
        layout = self.layout
        more = f"({self._around(layout.separator)} call)*" if is_repeated else ""
        reasoning = ReasoningGrammar(self.token_ids, self.reasoning)
        start = [
            reasoning.before,
            self._around(layout.head),
            "call",
            more,
            self._around(layout.tail),
        ]
        calls = [f"call_{number}" for number in range(len(schemas))]
        lines = [f"start: {' '.join(filter(None, start))}", f"call: {' | '.join(calls)}"]
        for number, (name, schema) in enumerate(schemas.items()):
            given = json.dumps({**schema, **_BLANKS}, ensure_ascii=False)
            lines.append(f"call_{number}: {self._literal(name + layout.between)} object_{number}")
            lines.append(f"object_{number}: %json {given}")
        return "\n".join([*lines, *reasoning.rules])

    def _around(self, text: str) -> str:
        """Literal text that may hold the probe's id."""
        return " ".join(
            f"({self._with_ids(part)})?" if number % 2 else self._with_ids(part)
            for number, part in enumerate(_ID_MEMBER.split(text))
            if part
        )

    def _with_ids(self, text: str) -> str:
        literals = [self._literal(part) for part in text.split(PROBE_CALL_ID)]
        return f" {_ID} ".join(literals).strip()

    def _literal(self, text: str) -> str:
        return literal(text, self.token_ids)
