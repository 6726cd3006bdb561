"""A chat completion as a response: the object, or the events of a stream.

A stream's events are numbered and come in OpenAI's order: an item is added, its parts and deltas follow, it is done.
Thoughts and text end when something else begins; calls stay open to the end, because an engine may write several at
once. The last event, with the whole response, stands where a chat stream has ``[DONE]``; after an error there is none.

It refuses to make up what a model did not say: a response that was cut short is ``incomplete`` and says why.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from art_backends.proxy import sse, wire
from art_backends.proxy.outcome import GIVEN_UP, UNFINISHED, place_of_call

Item = dict[str, Any]
Keep = Callable[[dict[str, Any], dict[str, Any]], None]

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# What a response says again of its request: the name, and what stands there if the request did not say.
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


class Reply:
    """The writer of one response. ``keep``: what remembers it for later requests, None if it is not to be stored."""

    def __init__(self, body: Mapping[str, Any], keep: Keep | None) -> None:
        self._response: dict[str, Any] = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": body["model"],
            "output": [],
            "usage": None,
            **{name: usual if body.get(name) is None else body[name] for name, usual in _ECHOED.items()},
        }
        self._keep = keep
        self._stream = _Stream()
        self._begun = False
        self._broken = False
        self._finish: str | None = None

    def whole(self, data: dict[str, Any]) -> bytes:
        """The response object."""
        choice = data["choices"][0]
        if choice.get("finish_reason") in UNFINISHED:
            raise ValueError(GIVEN_UP)
        items = _Items()
        message = choice["message"]
        items.thought(message.get("reasoning") or message.get("reasoning_content") or "")
        items.said("refusal", message.get("refusal") or "", [])
        items.said("output_text", message.get("content") or "", _logprobs(choice))
        for number, call in enumerate(message.get("tool_calls") or ()):
            items.called({**call, "index": number})
        self._complete(items, choice.get("finish_reason"), data.get("usage"))
        return orjson.dumps(self._response)

    def chunk(self, data: dict[str, Any], name: bytes) -> bytes:
        """The events for a chunk."""
        stream = self._stream
        if not self._begun:
            self._begun = True
            stream.event("response.created", response=self._response)
            stream.event("response.in_progress", response=self._response)
        if data.get("usage") is not None:
            self._response["usage"] = _usage(data["usage"])
        for choice in data.get("choices") or ():
            delta = choice.get("delta") or {}
            stream.thought(delta.get("reasoning") or delta.get("reasoning_content") or "")
            stream.said("refusal", delta.get("refusal") or "", [])
            stream.said("output_text", delta.get("content") or "", _logprobs(choice))
            for call in delta.get("tool_calls") or ():
                stream.called(call)
            self._finish = choice.get("finish_reason") or self._finish
            if choice.get("finish_reason") is not None:
                stream.close(cut=self._finish in _INCOMPLETE)
        return stream.take()

    def comment(self, text: bytes) -> bytes:
        """The comment as it is."""
        return sse.encode_comment(text)

    def broken(self, content: bytes, name: bytes) -> bytes:
        """``response.failed`` and, for clients that look for it alone, ``error``."""
        self._broken = True
        error = orjson.loads(content).get("error")
        told = error if isinstance(error, dict) else {"message": str(error)}
        told = {"code": str(told.get("code") or "server_error"), "message": str(told.get("message")), "param": None}
        failed = {"code": "server_error", "message": told["message"]}
        output = self._stream.found
        response = {**self._response, "status": "failed", "error": failed, "output": output}
        self._stream.event("response.failed", response=response)
        self._stream.event("error", **told, error={"type": "server_error", **told})
        return self._stream.take()

    def end(self) -> bytes:
        """``response.completed`` or ``response.incomplete``."""
        if self._broken:
            return b""
        if self._finish in UNFINISHED:
            return self.broken(wire.envelope(502, GIVEN_UP), b"")
        self._complete(self._stream, self._finish, None)
        self._stream.event(f"response.{self._response['status']}", response=self._response)
        return self._stream.take()

    def _complete(self, items: _Items, finish: str | None, usage: Any) -> None:
        response = self._response
        reason = _INCOMPLETE.get(finish or "")
        items.close(cut=reason is not None)
        response["output"] = items.found
        response["status"] = "completed" if reason is None else "incomplete"
        response["incomplete_details"] = None if reason is None else {"reason": reason}
        response["completed_at"] = int(time.time()) if reason is None else None
        if usage is not None:
            response["usage"] = _usage(usage)
        if self._keep is not None:
            self._keep(response, as_message(items.found))


def as_message(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The items of a response as the one chat message that they are; what is no text, thought or call is left out."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for item in items:
        if item["type"] == "message":
            text = "".join(part.get("text") or part.get("refusal") or "" for part in item["content"])
            message["content"] = (message["content"] or "") + text
        elif item["type"] == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            message["reasoning"] = message.get("reasoning", "") + "".join(part["text"] for part in parts)
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message


class _Items:
    """The items of a response in the order in which they began. Overridden where their events are told."""

    def __init__(self) -> None:
        self.found: list[Item] = []
        self._open: Item | None = None  # thoughts or a message
        self._calls: dict[int, Item] = {}

    def thought(self, text: str) -> None:
        """More of the thoughts."""
        if text:
            item = self._one("reasoning", {"summary": [], "content": [], "encrypted_content": None}, "rs")
            self._grow(item, {"type": "reasoning_text", "text": ""}, "text", text, [])

    def said(self, kind: str, text: str, logprobs: list[Any]) -> None:
        """More of the text, or of a refusal."""
        if text:
            item = self._one("message", {"role": "assistant", "content": []}, "msg")
            field = "text" if kind == "output_text" else "refusal"
            empty: Item = {"type": kind, field: ""}
            if kind == "output_text":
                empty |= {"annotations": [], "logprobs": []}
            self._grow(item, empty, field, text, logprobs)

    def called(self, call: Mapping[str, Any]) -> None:
        """A call, or more of it."""
        index = place_of_call(call, self._calls, "call_id")
        function = call.get("function") or {}
        if index not in self._calls:
            self._end_open(cut=False)
            given = {"call_id": call.get("id") or _id("call"), "name": function.get("name") or "", "arguments": ""}
            self._calls[index] = self._add("function_call", given, "fc")
        if function.get("arguments"):
            self._argue(self._calls[index], function["arguments"])

    def close(self, *, cut: bool) -> None:
        """Nothing more comes. ``cut``: the last item is incomplete."""
        last = self.found[-1] if self.found else None
        self._end_open(cut=cut and self._open is last)
        for item in self._calls.values():
            if item["status"] == "in_progress":
                self._done(item, cut=cut and item is last)

    def _one(self, kind: str, empty: Item, prefix: str) -> Item:
        if self._open is None or self._open["type"] != kind:
            self._end_open(cut=False)
            self._open = self._add(kind, empty, prefix)
        return self._open

    def _end_open(self, *, cut: bool) -> None:
        if self._open is not None:
            self._done(self._open, cut=cut)
            self._open = None

    def _add(self, kind: str, empty: Item, prefix: str) -> Item:
        item = {"id": _id(prefix), "type": kind, "status": "in_progress", **empty}
        self.found.append(item)
        return item

    def _grow(self, item: Item, empty: Item, field: str, text: str, logprobs: list[Any]) -> None:
        if not item["content"] or item["content"][-1]["type"] != empty["type"]:
            item["content"].append(empty)
        part = item["content"][-1]
        part[field] += text
        if logprobs:
            part["logprobs"].extend(logprobs)

    def _argue(self, item: Item, arguments: str) -> None:
        item["arguments"] += arguments

    def _done(self, item: Item, *, cut: bool) -> None:
        item["status"] = "incomplete" if cut else "completed"


class _Stream(_Items):
    """The items of a stream: each change is told by an event."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[bytes] = []
        self._number = 0

    def event(self, kind: str, **fields: Any) -> None:
        """Tell an event."""
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        self._events.append(sse.encode(data, kind.encode()))

    def take(self) -> bytes:
        """The events since the last time."""
        events, self._events = self._events, []
        return b"".join(events)

    def _at(self, item: Item) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self.found.index(item)}

    def _add(self, kind: str, empty: Item, prefix: str) -> Item:
        item = super()._add(kind, empty, prefix)
        self.event("response.output_item.added", output_index=len(self.found) - 1, item=item)
        return item

    def _grow(self, item: Item, empty: Item, field: str, text: str, logprobs: list[Any]) -> None:
        content = item["content"]
        if content and content[-1]["type"] != empty["type"]:
            self._end_part(item)
        if not content or content[-1]["type"] != empty["type"]:
            self.event("response.content_part.added", **self._at(item), content_index=len(content), part=empty)
        super()._grow(item, empty, field, text, logprobs)
        more = {"logprobs": logprobs} if empty["type"] == "output_text" else {}
        told = f"response.{empty['type']}.delta"
        self.event(told, **self._at(item), content_index=len(content) - 1, delta=text, **more)

    def _argue(self, item: Item, arguments: str) -> None:
        super()._argue(item, arguments)
        self.event("response.function_call_arguments.delta", **self._at(item), delta=arguments)

    def _end_part(self, item: Item) -> None:
        part = item["content"][-1]
        at = {**self._at(item), "content_index": len(item["content"]) - 1}
        said = {key: part[key] for key in ("text", "refusal", "logprobs") if key in part}
        self.event(f"response.{part['type']}.done", **at, **said)
        self.event("response.content_part.done", **at, part=part)

    def _done(self, item: Item, *, cut: bool) -> None:
        super()._done(item, cut=cut)
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            self.event("response.function_call_arguments.done", **self._at(item), **told)
        elif item["content"]:
            self._end_part(item)
        self.event("response.output_item.done", output_index=self.found.index(item), item=item)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return list((choice.get("logprobs") or {}).get("content") or ())


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    sent, made = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": sent,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": sent + made,
    }
