"""A model's chat template: from its files, compiled as transformers compiles it, and messages rendered to one string.

Differences between templates are probed once at load: how tool calls must be given, and whether there is a developer
role. Special tokens written inside a message are recognised when the text is tokenised, as other servers do.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import CheckpointError, RequestError
from router_service.openai_errors import safe_text

Message = dict[str, Any]
"""One message as a template sees it: role, content, and for tool turns tool_calls or tool_call_id."""

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TEMPLATE_FILE = "chat_template.jinja"
_PROBE_NAME, _PROBE_VALUE = "probe_tool", "probe_value"


@dataclass(frozen=True)
class _ToolCallForm:
    """How a template wants an assistant turn that calls tools."""

    content_when_empty: str | None
    arguments_as_object: bool


_TOOL_CALL_FORMS = (
    _ToolCallForm("", True),
    _ToolCallForm("", False),
    _ToolCallForm(None, True),
    _ToolCallForm(None, False),
)


class ChatTemplate:
    """Renders chats. Immutable after construction; safe to use from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, origin: str = "chat template"
    ) -> None:
        """`origin` names the source in errors. Raises CheckpointError for a template that does not compile."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin}: the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(
                f"{origin}: the chat template does not compile: {error}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._has_developer = "developer" in source
        self._tool_call_form = self._probe_tool_calls()

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, up to where the assistant's answer starts.

        Tool-call arguments are given as JSON objects. Raises RequestError for messages that the template refuses.
        """
        try:
            return self._render([self._adapt(message) for message in messages])
        except Exception as error:  # a template is a program of the model's makers
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error

    def _adapt(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._has_developer:
            return {**message, "role": "system"}
        if message.get("tool_calls"):
            return _with_form(message, self._known_tool_call_form())
        return message

    def _known_tool_call_form(self) -> _ToolCallForm:
        if self._tool_call_form is None:
            raise RequestError(
                "the model's chat template cannot show tool calls; leave them out", field="messages"
            )
        return self._tool_call_form

    def _render(self, messages: list[Message]) -> str:
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
        )

    def _probe_tool_calls(self) -> _ToolCallForm | None:
        return next((form for form in _TOOL_CALL_FORMS if self._shows_tool_calls(form)), None)

    def _shows_tool_calls(self, form: _ToolCallForm) -> bool:
        call = {"name": _PROBE_NAME, "arguments": {"key": _PROBE_VALUE}}
        calls = [{"id": "call_0", "type": "function", "function": call}]
        turn = _with_form({"role": "assistant", "content": "", "tool_calls": calls}, form)
        answer = {"role": "tool", "content": "result", "tool_call_id": "call_0"}
        try:
            text = self._render([{"role": "user", "content": "question"}, turn, answer])
        except Exception:  # as in render
            return False
        return _PROBE_NAME in text and _PROBE_VALUE in text


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """The template of `chat_template.jinja`, else of `tokenizer_config.json`; None if the model has none.

    Raises CheckpointError naming the file.
    """
    config_file, template_file = model_dir / "tokenizer_config.json", model_dir / _TEMPLATE_FILE
    config = read_json_object(config_file) if present(config_file) else {}
    if present(template_file):
        source, origin = _read_text(template_file), template_file
    else:
        named, origin = _configured_template(config_file, config), config_file
        if named is None:
            return None
        source = named
    return ChatTemplate(source, _special_tokens(config), origin=str(origin))


def present(file: Path) -> bool:
    """Whether the directory has it, a link that leads nowhere included: that is a wrong file, not an absent one."""
    return file.exists() or file.is_symlink()


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises CheckpointError naming the file."""
    text = _read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{file}: not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error


def _configured_template(file: Path, config: Mapping[str, Any]) -> str | None:
    """One template, or the default one of a list of named ones."""
    value = config.get("chat_template")
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(
        f"{file}: chat_template is {safe_text(value)}; supported: a string or a list of objects "
        "with name and template"
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _with_form(message: Message, form: _ToolCallForm) -> Message:
    calls = message["tool_calls"]
    if not form.arguments_as_object:
        calls = [_with_argument_text(call) for call in calls]
    content = message["content"] or form.content_when_empty
    return {**message, "content": content, "tool_calls": calls}


def _with_argument_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


# The environment: what transformers (chat_template_utils) gives to a template, nothing else.


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks the assistant's tokens for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which would change prompts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
