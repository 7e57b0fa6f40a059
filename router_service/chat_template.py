"""A model's chat template: from its files, compiled as transformers compiles it, and messages rendered to one string.

Differences between templates are probed once at load, see `template_probes`. Special tokens written inside a message
are recognised when the text is tokenised, as other servers do.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from cluster.errors import CheckpointError, RequestError
from router_service.openai_errors import safe_text
from router_service.template_environment import template_environment, template_variables
from router_service.template_probes import Message, RenderOptions, ToolCallForm, probe_template

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
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", *_SPECIAL_TOKENS})
"""Variables that are not for a request to say."""
_CONTINUE_TAG = "END_OF_THE_CONTINUED_MESSAGE "
"""Marks where the last message's content ends; the space tells whether the template strips contents (idea and rule:
transformers)."""


class ChatTemplate:
    """Renders chats. Immutable after construction; safe to use from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, origin: str = "chat template"
    ) -> None:
        """`origin` names the source in errors. Raises CheckpointError for a template that does not compile."""
        environment = template_environment()
        try:
            self._template = environment.from_string(source)
            self.variables = template_variables(environment, source) - _GIVEN
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin}: the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(
                f"{origin}: the chat template does not compile: {error}"
            ) from error
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._has_developer = "developer" in source
        self.traits = probe_template(self._render)

    def render(self, messages: Sequence[Message], options: RenderOptions | None = None) -> str:
        """The prompt, by default up to where the assistant's answer starts.

        Tool-call arguments are given as JSON objects. Raises RequestError for messages that the template refuses.
        """
        try:
            adapted = [self._adapt(message) for message in messages]
            return self._render(adapted, options or RenderOptions())
        except RequestError:
            raise
        except Exception as error:  # a template is a program of the model's makers
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error

    def render_open(self, messages: Sequence[Message], options: RenderOptions) -> str:
        """The prompt up to the end of the last message's content. Raises RequestError, also for a content that the
        template does not show."""
        last = messages[-1]
        tagged = {**last, "content": last["content"] + _CONTINUE_TAG}
        text = self.render([*messages[:-1], tagged], options)
        end = text.rfind(_CONTINUE_TAG.strip())
        if end < 0:
            raise RequestError(
                "continue_final_message: the model's chat template does not show the content of the "
                "last message",
                field="continue_final_message",
            )
        return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()

    def _adapt(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._has_developer:
            return {**message, "role": "system"}
        if message.get("tool_calls"):
            return self._known_tool_call_form().applied(message)
        return message

    def _known_tool_call_form(self) -> ToolCallForm:
        if self.traits.tool_call_form is None:
            raise RequestError(
                "the model's chat template cannot show tool calls; leave them out", field="messages"
            )
        return self.traits.tool_call_form

    def _render(self, messages: list[Message], options: RenderOptions) -> str:
        return self._template.render(
            **options.variables,
            messages=messages,
            tools=options.tools,
            documents=None,
            add_generation_prompt=options.add_generation_prompt,
            **self.special_tokens,
        )


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
