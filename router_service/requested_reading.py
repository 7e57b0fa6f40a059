"""How the answer to a chat is to be read: by what the model writes, what the prompt has begun and what was asked."""

from cluster.errors import RequestError
from router_service.answer_reading import AnswerReading, ToolReading
from router_service.chat_messages import content_text
from router_service.model_parsers import ReasoningKind
from router_service.model_text import ModelText
from router_service.protocol import ChatBody
from router_service.reasoning import END_THINK, THINK, ReasoningStart
from router_service.tool_fields import ToolSchemas

_TAIL = 64
"""Characters of a prompt that are looked at for what the generation prompt has opened or closed."""


def answer_reading(body: ChatBody, prompt: str, text: ModelText) -> AnswerReading:
    """prompt: as rendered. Raises RequestError for tools whose calls cannot be read, or not be written."""
    if body.grammar_fields:
        _refuse_tools(body)
    kind = text.parsers.reasoning
    return AnswerReading(
        reasoning=None if kind is None else _reasoning_start(body, prompt, kind),
        tools=_tool_reading(body, text),
    )


def _refuse_tools(body: ChatBody) -> None:
    if body.offered_tools:
        raise RequestError(
            f"tools: cannot be used together with {body.grammar_fields[0]}, which leaves no room for "
            'calls; send one of them, or tool_choice "none"',
            field="tools",
        )


def _reasoning_start(body: ChatBody, prompt: str, kind: ReasoningKind) -> ReasoningStart:
    if body.continue_final_message:
        content = content_text(body.messages[-1].content)
        is_open = content.rfind(THINK) > content.rfind(END_THINK)
        return ReasoningStart.INSIDE if is_open else ReasoningStart.OUTSIDE
    tail = prompt[-_TAIL:].rstrip()
    if tail.endswith(END_THINK):
        return ReasoningStart.OUTSIDE
    if tail.endswith(THINK) or kind == "deepseek_r1":
        return ReasoningStart.INSIDE
    return ReasoningStart.IF_OPENED


def _tool_reading(body: ChatBody, text: ModelText) -> ToolReading | None:
    if not body.offered_tools:
        return None
    form = text.parsers.call_format
    if form is None:
        raise RequestError(
            "tools: the calls that this model writes are not understood; serve it with "
            "--tool-call-parser if they have one of its formats",
            field="tools",
        )
    return ToolReading(
        form=form,
        functions=ToolSchemas(body.offered_tools, are_kept=body.forces_calls),
        max_calls=body.max_calls,
        is_of_one_function=body.forced_function is not None,
    )
