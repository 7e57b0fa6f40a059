"""Reasoning before an answer that is held to a grammar, and literal text, as parts of llguidance's Lark. Pure.

Literal text is written as a model writes it: what is a token of its own in the vocabulary can come as that token only.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.grammar import ANSWER
from router_service.reasoning import END_THINK, THINK, ReasoningStart

_THOUGHT = "(?s:.*)"


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """Tokens that are never cut by their ids, the rest as strings; empty for nothing.

    token_ids: of those tokens, by their text.
    """
    if not text:
        return ""
    never_cut = sorted(filter(None, token_ids), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, never_cut))})", text) if never_cut else [text]
    return " ".join(
        f"<[{token_ids[part]}]>" if number % 2 else json.dumps(part, ensure_ascii=False)
        for number, part in enumerate(parts)
        if part
    )


@dataclass(frozen=True)
class ReasoningGrammar:
    """token_ids: as of `literal`; start: where the answer begins, None: without reasoning."""

    token_ids: Mapping[str, int]
    start: ReasoningStart | None

    @property
    def before(self) -> str:
        """What stands before the rest of a rule; empty for nothing."""
        think = literal(THINK, self.token_ids)
        match self.start:
            case ReasoningStart.INSIDE:
                return f"{think}? thought"
            case ReasoningStart.IF_OPENED:
                return f"({think} thought)?"
            case ReasoningStart.OUTSIDE | None:
                return ""

    @property
    def rules(self) -> list[str]:
        """That `before` names: any text up to the end of the reasoning, and line breaks, which no model is to go on
        with for ever."""
        if not self.before:
            return []
        breaks = r"(/\n{1,3}/)?"
        if END_THINK in self.token_ids:
            return [f"thought: /{_THOUGHT}/ {literal(END_THINK, self.token_ids)} {breaks}"]
        end = END_THINK.replace("/", r"\/")
        return [f"thought: thinking {breaks}", f"thinking[lazy]: /{_THOUGHT}{end}/"]

    @property
    def preface(self) -> str | None:
        """For `cluster.grammar.grammar_text`; None for nothing."""
        return "\n".join([f"start: {self.before} {ANSWER}", *self.rules]) if self.before else None
