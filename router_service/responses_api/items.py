"""The output of one response: reasoning, messages and function calls in the order in which they are said."""

from dataclasses import dataclass, field
from typing import Any, Literal

from router_service.said import Said, ToolCall

Json = dict[str, Any]
Event = tuple[str, Json]
"""Kind, and fields beside it and the number."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass
class _OpenItem:
    """The one to which text is added. kind: of its one part."""

    kind: Literal["output_text", "reasoning_text"]
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


class OutputItems:
    """Owner of the items, of which at most the last one is open."""

    def __init__(self, token: str) -> None:
        """token: what ids are made of."""
        self._token = token
        self._open: _OpenItem | None = None
        self._logprobs: list[Json] = []
        """Of tokens that no text has gone with yet."""
        self.finished: list[Json] = []

    def say(self, said: Said, logprobs: list[Json]) -> list[Event]:
        self._logprobs += logprobs
        events: list[Event] = []
        if said.reasoning:
            events += self._add("reasoning_text", said.reasoning)
        if said.text:
            events += self._add("output_text", said.text)
        for call in said.calls:
            events += [*self._close("completed"), *self._call(call)]
        return events

    def end(self, status: ItemStatus) -> list[Event]:
        """The open item is finished with `status`; an answer that said nothing is an empty message."""
        events: list[Event] = []
        if self._open is None and not self.finished:
            events = self._begin("output_text")
        return events + self._close(status)

    def _add(self, kind: Literal["output_text", "reasoning_text"], text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = [*self._close("completed"), *self._begin(kind)]
        item = self._open
        assert item is not None
        item.text.append(text)
        told: Json = {**item.place, "delta": text}
        if kind == "output_text":
            told["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += told["logprobs"]
        return [*events, (f"response.{kind}.delta", told)]

    def _begin(self, kind: Literal["output_text", "reasoning_text"]) -> list[Event]:
        item = _OpenItem(kind, self._id("msg" if kind == "output_text" else "rs"), self._index)
        self._open = item
        added = {"output_index": item.index, "item": item.item("in_progress", [])}
        return [
            ("response.output_item.added", added),
            ("response.content_part.added", {**item.place, "part": item.part}),
        ]

    def _close(self, status: ItemStatus) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        told: Json = {**item.place, "text": "".join(item.text)}
        if item.kind == "output_text":
            item.logprobs += self._logprobs
            told["logprobs"], self._logprobs = item.logprobs, []
        whole = item.item(status, [item.part])
        self.finished.append(whole)
        return [
            (f"response.{item.kind}.done", told),
            ("response.content_part.done", {**item.place, "part": item.part}),
            ("response.output_item.done", {"output_index": item.index, "item": whole}),
        ]

    def _call(self, call: ToolCall) -> list[Event]:
        """Calls are said whole."""
        index, call_id = self._index, self._id("fc")
        place = {"item_id": call_id, "output_index": index}
        item: Json = {
            "id": call_id,
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        begun = {**item, "status": "in_progress", "arguments": ""}
        done = {**place, "name": call.name, "arguments": call.arguments}
        self.finished.append(item)
        return [
            ("response.output_item.added", {"output_index": index, "item": begun}),
            ("response.function_call_arguments.delta", {**place, "delta": call.arguments}),
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]

    @property
    def _index(self) -> int:
        return len(self.finished)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._token}_{self._index}"
