"""What a chat template shows of a chat, found by rendering small ones: templates cannot be asked, and they differ.

Pure functions over a render function. A template that fails on a probe does not show what the probe holds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""One message as a template sees it: role, content, and for tool turns tool_calls or tool_call_id."""
Tool = dict[str, Any]
"""One tool as a template sees it: type and function, as OpenAI clients send it."""

PROBE_CALL_ID = "probe0123"
"""Nine letters and digits: some templates (Mistral's) take no other ids."""
PROBE_FUNCTION, PROBE_ARGUMENTS = "probe_tool", {"key": "probe_value"}
_MARK = "probe_mark"
_QUESTION: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": "answer"}


@dataclass(frozen=True)
class RenderOptions:
    """variables: further ones of the template."""

    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    variables: dict[str, Any] = field(default_factory=dict)


Render = Callable[[list[Message], RenderOptions], str]


@dataclass(frozen=True)
class ToolCallForm:
    """How a template wants an assistant turn that calls tools."""

    content_when_empty: str | None
    arguments_as_object: bool

    def applied(self, message: Message) -> Message:
        """message: with tool_calls, arguments as objects."""
        calls = message["tool_calls"]
        if not self.arguments_as_object:
            calls = [_with_argument_text(call) for call in calls]
        content = message["content"] or self.content_when_empty
        return {**message, "content": content, "tool_calls": calls}


_TOOL_CALL_FORMS = (
    ToolCallForm("", True),
    ToolCallForm("", False),
    ToolCallForm(None, True),
    ToolCallForm(None, False),
)


@dataclass(frozen=True)
class TemplateTraits:
    """tool_call_form: None if calls are not shown; named_roles: whose messages may have a name; shown_call,
    shown_calls: how one call of the probe and two of them read, the chat up to them included, "" if not shown."""

    tool_call_form: ToolCallForm | None
    shows_tools: bool
    shows_reasoning: bool
    named_roles: frozenset[str]
    shown_call: str
    shown_calls: str


def probe_template(render: Render) -> TemplateTraits:
    form = next((f for f in _TOOL_CALL_FORMS if _shows_tool_calls(render, f)), None)
    return TemplateTraits(
        tool_call_form=form,
        shows_tools=_shows_tools(render),
        shows_reasoning=_shows_reasoning(render, form),
        named_roles=frozenset(
            role
            for role in ("system", "user", "assistant", "tool")
            if _shows_name(render, role, form)
        ),
        shown_call="" if form is None else _rendered_turn(render, form, 1),
        shown_calls="" if form is None else _rendered_turn(render, form, 2),
    )


def _text(render: Render, messages: list[Message], options: RenderOptions | None = None) -> str:
    """Empty where the template refuses."""
    try:
        return render(messages, options or RenderOptions(add_generation_prompt=False))
    except Exception:  # a template is a program of the model's makers
        return ""


def _turn(form: ToolCallForm, num_calls: int = 1, /, **fields: str) -> Message:
    call = {"name": PROBE_FUNCTION, "arguments": dict(PROBE_ARGUMENTS)}
    calls = [{"id": PROBE_CALL_ID, "type": "function", "function": call}] * num_calls
    return form.applied({"role": "assistant", "content": "", "tool_calls": calls, **fields})


def _result(**fields: str) -> Message:
    return {"role": "tool", "content": "result", "tool_call_id": PROBE_CALL_ID, **fields}


def _rendered_turn(render: Render, form: ToolCallForm, num_calls: int) -> str:
    turn = _turn(form, num_calls)
    results = [_result()] * num_calls
    return _text(render, [_QUESTION, turn]) or _text(render, [_QUESTION, turn, *results])


def _shows_tool_calls(render: Render, form: ToolCallForm) -> bool:
    text = _text(render, [_QUESTION, _turn(form), _result()])
    return PROBE_FUNCTION in text and PROBE_ARGUMENTS["key"] in text


def _shows_tools(render: Render) -> bool:
    function = {
        "name": _MARK,
        "description": "a probe",
        "parameters": {"type": "object", "properties": {}},
    }
    options = RenderOptions(tools=[{"type": "function", "function": function}])
    return _MARK in _text(render, [_QUESTION], options)


def _shows_reasoning(render: Render, form: ToolCallForm | None) -> bool:
    """In a plain answer or, where it is shown only until the next question, in one that waits for its tools."""
    fields = reasoning_fields(_MARK)
    chats = [[_QUESTION, {**_ANSWER, **fields}], [_QUESTION, {**_ANSWER, **fields}, _QUESTION]]
    if form is not None:
        chats.append([_QUESTION, _turn(form, **fields), _result()])
    return any(_MARK in _text(render, chat) for chat in chats)


def _shows_name(render: Render, role: str, form: ToolCallForm | None) -> bool:
    if role == "tool":
        turns = [] if form is None else [_QUESTION, _turn(form), _result(name=_MARK)]
    elif role == "system":
        turns = [{"role": "system", "content": "rules", "name": _MARK}, _QUESTION]
    elif role == "user":
        turns = [{**_QUESTION, "name": _MARK}]
    else:
        turns = [_QUESTION, {**_ANSWER, "name": _MARK}, _QUESTION]
    return _MARK in _text(render, turns)


def reasoning_fields(text: str) -> dict[str, str]:
    """Under both names that templates know."""
    return {"reasoning_content": text, "reasoning": text}


def _with_argument_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
