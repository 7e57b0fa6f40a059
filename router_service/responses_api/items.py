"""The output of one response: reasoning, messages and function calls in the order in which they are said."""

from dataclasses import dataclass, field
from typing import Any, Literal

from router_service.said import CallHead, CallPart, Said

Json = dict[str, Any]
Event = tuple[str, Json]
"""Kind, and fields beside it and the number."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]


Kind = Literal["output_text", "reasoning_text"]


@dataclass
class _OpenText:
    """A message or reasoning, to which text is added. kind: of its one part."""

    kind: Kind
    id: str
    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def part(self) -> Json:
        part: Json = {"type": self.kind, "text": "".join(self.text)}
        if self.kind == "output_text":
            part |= {"annotations": [], "logprobs": self.logprobs}
        return part

    def item(self, status: ItemStatus, content: list[Json]) -> Json:
        if self.kind == "reasoning_text":
            kind: Json = {"type": "reasoning", "summary": []}
        else:
            kind = {"type": "message", "role": "assistant"}
        return {"id": self.id, **kind, "status": status, "content": content}


@dataclass
class _OpenCall:
    """A function call, to whose arguments text is added."""

    head: CallHead
    id: str
    index: int
    arguments: list[str] = field(default_factory=list)

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}

    def item(self, status: ItemStatus) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.head.id,
            "name": self.head.name,
            "arguments": "".join(self.arguments),
        }


class OutputItems:
    """Owner of the items, of which at most the last one is open."""

    def __init__(self, token: str) -> None:
        """token: what ids are made of."""
        self._token = token
        self._open: _OpenText | _OpenCall | None = None
        self._logprobs: list[Json] = []
        """Of tokens that no text has gone with yet."""
        self.finished: list[Json] = []

    def say(self, said: Said, logprobs: list[Json]) -> list[Event]:
        self._logprobs += logprobs
        events: list[Event] = []
        for part in said.going_on:
            events += self._argue(part)
        if said.reasoning:
            events += self._add("reasoning_text", said.reasoning)
        if said.text:
            events += self._add("output_text", said.text)
        for part in said.begun:
            events += [*self._close("completed"), *self._call(part)]
        return events

    def end(self, status: ItemStatus) -> list[Event]:
        """The open item is finished with `status`; an answer that said nothing is an empty message."""
        events: list[Event] = []
        if self._open is None and not self.finished:
            events = self._begin("output_text")
        return events + self._close(status)

    def _add(self, kind: Kind, text: str) -> list[Event]:
        item, events = self._open, []
        if not isinstance(item, _OpenText) or item.kind != kind:
            events = [*self._close("completed"), *self._begin(kind)]
            item = self._open
        assert isinstance(item, _OpenText)
        item.text.append(text)
        told: Json = {**item.place, "delta": text}
        if kind == "output_text":
            told["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += told["logprobs"]
        return [*events, (f"response.{kind}.delta", told)]

    def _begin(self, kind: Kind) -> list[Event]:
        item = _OpenText(kind, self._id("msg" if kind == "output_text" else "rs"), self._index)
        self._open = item
        added = {"output_index": item.index, "item": item.item("in_progress", [])}
        return [
            ("response.output_item.added", added),
            ("response.content_part.added", {**item.place, "part": item.part}),
        ]

    def _call(self, part: CallPart) -> list[Event]:
        assert part.head is not None
        call = self._open = _OpenCall(part.head, self._id("fc"), self._index)
        added = {"output_index": call.index, "item": call.item("in_progress")}
        return [("response.output_item.added", added), *self._argue(part)]

    def _argue(self, part: CallPart) -> list[Event]:
        call = self._open
        assert isinstance(call, _OpenCall), "only a call that was begun goes on"
        events: list[Event] = []
        if part.arguments:
            call.arguments.append(part.arguments)
            told = {**call.place, "delta": part.arguments}
            events.append(("response.function_call_arguments.delta", told))
        return events + (self._close_call(call, "completed") if part.ends else [])

    def _close(self, status: ItemStatus) -> list[Event]:
        """A call that is still open has been cut."""
        match self._open:
            case _OpenText() as item:
                return self._close_text(item, status)
            case _OpenCall() as call:
                return self._close_call(call, "incomplete")
            case None:
                return []

    def _close_text(self, item: _OpenText, status: ItemStatus) -> list[Event]:
        told: Json = {**item.place, "text": "".join(item.text)}
        if item.kind == "output_text":
            item.logprobs += self._logprobs
            told["logprobs"], self._logprobs = item.logprobs, []
        return [
            (f"response.{item.kind}.done", told),
            ("response.content_part.done", {**item.place, "part": item.part}),
            self._finish(item.item(status, [item.part])),
        ]

    def _close_call(self, call: _OpenCall, status: ItemStatus) -> list[Event]:
        item = call.item(status)
        done = {**call.place, "name": call.head.name, "arguments": item["arguments"]}
        return [("response.function_call_arguments.done", done), self._finish(item)]

    def _finish(self, item: Json) -> Event:
        index, self._open = self._index, None
        self.finished.append(item)
        return "response.output_item.done", {"output_index": index, "item": item}

    @property
    def _index(self) -> int:
        return len(self.finished)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._token}_{self._index}"
