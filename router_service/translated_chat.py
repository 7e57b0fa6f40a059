"""A body of another API as the chat that it stands for: fields of its own are translated, others are the chat's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from router_service.body_fields import Strict
from router_service.body_validation import validate
from router_service.field_names import FieldNames
from router_service.protocol import ChatBody

B = TypeVar("B", bound=Strict)


@dataclass(frozen=True)
class TranslatedChat:
    """json: as a client of /v1/chat/completions would have sent it; names: where its fields came from."""

    json: dict[str, Any]
    names: FieldNames

    def body(self) -> ChatBody:
        """Raises RequestError with a chat's names."""
        return validate(ChatBody, self.json)


@dataclass
class ChatTurns:
    """Messages of the chat so far, and which part of the client's body each came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, message: dict[str, Any], sent_as: str) -> None:
        self.messages.append(message)
        self.name("", sent_as)

    def name(self, part: str, sent_as: str) -> None:
        """Of a part of the last message, as `.content`."""
        self.names[f"messages[{len(self.messages) - 1}]{part}"] = sent_as

    def last_of(self, role: str) -> dict[str, Any] | None:
        """The last message if it has this role."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == role else None

    def answer(self, sent_as: str) -> dict[str, Any]:
        """The assistant's message that is last, or a new one."""
        if (last := self.last_of("assistant")) is None:
            last = {"role": "assistant"}
            self.add(last, sent_as)
        return last

    def call(self, call_id: str, function: dict[str, Any], sent_as: str, id_sent_as: str) -> None:
        """One more tool call of the assistant's message that is last, or of a new one."""
        calls = self.answer(sent_as).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        place = f".tool_calls[{len(calls) - 1}]"
        self.name(place, sent_as)
        self.name(f"{place}.function", sent_as)
        self.name(f"{place}.id", id_sent_as)


def own_part(
    model: type[B], json: Mapping[str, Any], the_chats: Collection[str]
) -> tuple[B, dict[str, Any]]:
    """The fields of its own as `model`, and those that mean what they mean in a chat as they were sent, unchecked.

    Raises RequestError for the first.
    """
    passed = {name: value for name, value in json.items() if name in the_chats}
    return validate(model, {k: v for k, v in json.items() if k not in passed}), passed
