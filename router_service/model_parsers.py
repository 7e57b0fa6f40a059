"""Which tool calls and which reasoning a model writes: as configured, or as its chat template shows.

The format of tool calls is the one in which the template's own rendering of a call can be read back.
"""

from dataclasses import dataclass
from typing import Literal

from router_service.chat_template import ChatTemplate
from router_service.reasoning import END_THINK, THINK
from router_service.said import joined
from router_service.template_probes import PROBE_ARGUMENTS, PROBE_FUNCTION
from router_service.tool_calls.call_format import (
    CallFormat,
    CallLayout,
    decode_json,
)
from router_service.tool_calls.call_layout import shown_layout
from router_service.tool_calls.deepseek import DEEPSEEK
from router_service.tool_calls.hermes import HERMES
from router_service.tool_calls.mistral import MISTRAL
from router_service.tool_calls.parser import ToolCallParser

ReasoningKind = Literal["deepseek_r1", "qwen3"]
"""deepseek_r1: an answer begins with its reasoning, whether it writes the opening marker or not; qwen3: only if it, or
the prompt, does. Where the prompt tells, both do the same."""

_FORMATS = {"hermes": HERMES, "deepseek": DEEPSEEK, "mistral": MISTRAL}


@dataclass(frozen=True)
class ParserNames:
    """As in the configuration."""

    tool_calls: Literal["auto", "none", "hermes", "deepseek", "mistral"] = "auto"
    reasoning: Literal["auto", "none", "deepseek_r1", "qwen3"] = "auto"


BY_TEMPLATE = ParserNames()


@dataclass(frozen=True)
class ModelParsers:
    """Names for logs, and what they stand for; None: none. shown_layout: of the template, if it has that format."""

    call_format_name: str
    reasoning: ReasoningKind | None
    shown_layout: CallLayout | None = None

    @property
    def call_format(self) -> CallFormat | None:
        return _FORMATS.get(self.call_format_name)

    @property
    def call_layout(self) -> CallLayout | None:
        """How calls are to be written; None without a format."""
        form = self.call_format
        return None if form is None else self.shown_layout or form.layout


def choose_parsers(names: ParserNames, template: ChatTemplate | None) -> ModelParsers:
    calls = names.tool_calls
    name = _shown_format(template) if calls == "auto" else calls
    return ModelParsers(name, _reasoning(names, template), _shown_layout(name, template))


def _shown_layout(name: str, template: ChatTemplate | None) -> CallLayout | None:
    form = _FORMATS.get(name)
    if form is None or template is None:
        return None
    return shown_layout(form, template.traits.shown_calls)


def _shown_format(template: ChatTemplate | None) -> str:
    shown = "" if template is None else template.traits.shown_call
    return next((name for name, form in _FORMATS.items() if _reads_back(form, shown)), "none")


def _reads_back(form: CallFormat, shown: str) -> bool:
    parser = ToolCallParser(form, _AnyFunction(), lambda: "")
    calls = joined([parser.add(shown), parser.finish()]).tool_calls
    return [(call.name, call.is_whole and decode_json(call.arguments)) for call in calls] == [
        (PROBE_FUNCTION, PROBE_ARGUMENTS)
    ]


class _AnyFunction:
    """The probe's, and others."""

    def offers(self, name: str) -> bool:
        return True

    def must_see(self, name: str) -> bool:
        return False

    def accept(self, name: str, arguments: str) -> bool:
        return True


def _reasoning(names: ParserNames, template: ChatTemplate | None) -> ReasoningKind | None:
    if names.reasoning in ("deepseek_r1", "qwen3"):
        return names.reasoning
    source = "" if template is None or names.reasoning == "none" else template.source
    return "qwen3" if THINK in source or END_THINK in source else None
