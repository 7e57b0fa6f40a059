"""A grammar of an answer that has to be calls, as text in llguidance's Lark. Pure.

Literal text is written as a model writes it: what is a token of its own in the vocabulary can come as that token only.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.grammar import BLANKS
from router_service.reasoning import END_THINK, THINK, ReasoningStart
from router_service.template_probes import PROBE_CALL_ID
from router_service.tool_calls.call_format import CallLayout

_ID_MEMBER = re.compile(rf'(,\s*"id":\s*"{PROBE_CALL_ID}")')
"""Shown of calls that are over and have an id. Whoever writes one need not."""
_ID = f"/[a-zA-Z0-9]{{{len(PROBE_CALL_ID)}}}/"
_BLANKS = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": BLANKS}}
_THOUGHT = "(?s:.*)"


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
        start = [self._before(), self._around(layout.head), "call", more, self._around(layout.tail)]
        calls = [f"call_{number}" for number in range(len(schemas))]
        lines = [f"start: {' '.join(filter(None, start))}", f"call: {' | '.join(calls)}"]
        for number, (name, schema) in enumerate(schemas.items()):
            given = json.dumps({**schema, **_BLANKS}, ensure_ascii=False)
            lines.append(f"call_{number}: {self._literal(name + layout.between)} object_{number}")
            lines.append(f"object_{number}: %json {given}")
        return "\n".join([*lines, *self._thought()])

    def _before(self) -> str:
        match self.reasoning:
            case ReasoningStart.INSIDE:
                return f"{self._literal(THINK)}? thought"
            case ReasoningStart.IF_OPENED:
                return f"({self._literal(THINK)} thought)?"
            case ReasoningStart.OUTSIDE | None:
                return ""

    def _thought(self) -> list[str]:
        """Any text up to the end of the reasoning, and line breaks, which no model is to go on with for ever."""
        if not self._before():
            return []
        breaks = r"(/\n{1,3}/)?"
        if END_THINK in self.token_ids:
            return [f"thought: /{_THOUGHT}/ {self._literal(END_THINK)} {breaks}"]
        end = END_THINK.replace("/", r"\/")
        return [f"thought: thinking {breaks}", f"thinking[lazy]: /{_THOUGHT}{end}/"]

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
        """Tokens that are never cut by their ids, the rest as strings; empty for nothing."""
        if not text:
            return ""
        never_cut = sorted(filter(None, self.token_ids), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, never_cut))})", text) if never_cut else [text]
        return " ".join(
            f"<[{self.token_ids[part]}]>" if number % 2 else json.dumps(part, ensure_ascii=False)
            for number, part in enumerate(parts)
            if part
        )
