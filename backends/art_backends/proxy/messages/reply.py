"""A chat completion as a message: the object, or the events of a stream.

A stream has one block after the other. Text and thinking flow; the input of a call is told when it is complete,
because an engine may write several calls at once and because input is an object: what a model wrote that is none goes
to the app as ``{"INVALID_JSON": what it wrote}``, the form that Anthropic's own documentation uses. The stop reason and
the counts stand in the last ``message_delta``. After an error there is neither, and an answer that the engine did not
end is an error.

It refuses to make up signatures of thinking: they are empty.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from art_backends.proxy import sse, wire
from art_backends.proxy.outcome import GIVEN_UP, UNFINISHED, add_tool_call

STOPS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(status: int, content: bytes) -> dict[str, Any]:
    """An error in OpenAI's envelope, in Anthropic's."""
    try:
        told = orjson.loads(content)["error"]
        message = told["message"] if isinstance(told, dict) else str(told)
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")
    kind = _ERRORS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(message)}, "request_id": None}


class Reply:
    """The writer of one message."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._events: list[bytes] = []
        self._begun = False
        self._broken = False
        self._count = 0  # blocks that were begun
        self._open: str | None = None  # the kind of the block that is open
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._stop: Any = None
        self._refused = self._called_any = False
        self._usage: Mapping[str, Any] = {}

    def whole(self, data: dict[str, Any]) -> bytes:
        """The message object."""
        choice = data["choices"][0]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        thinking = message.get("reasoning") or message.get("reasoning_content")
        if thinking:
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        text = message.get("content") or message.get("refusal")
        if text:
            content.append({"type": "text", "text": text})
        content += [_tool_use(call) for call in message.get("tool_calls") or ()]
        self._finish, self._stop = choice.get("finish_reason"), choice.get("stop_reason")
        if self._finish in UNFINISHED:
            raise ValueError(GIVEN_UP)
        self._usage = data.get("usage") or {}
        self._refused, self._called_any = bool(message.get("refusal")), bool(message.get("tool_calls"))
        return orjson.dumps(self._message(content) | self._end() | {"usage": self._counts()})

    def chunk(self, data: dict[str, Any], name: bytes) -> bytes:
        """The events for a chunk."""
        self._usage = data.get("usage") or self._usage
        if not self._begun:
            self._begun = True
            usage = {**self._counts(), "output_tokens": 0}
            start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
            self._event("message_start", message=start)
        for choice in data.get("choices") or ():
            delta = choice.get("delta") or {}
            self._flow("thinking", delta.get("reasoning") or delta.get("reasoning_content") or "")
            self._flow("text", delta.get("content") or delta.get("refusal") or "")
            self._refused = self._refused or bool(delta.get("refusal"))
            for call in delta.get("tool_calls") or ():
                add_tool_call(self._calls, call)
            if choice.get("finish_reason") is not None:
                self._finish, self._stop = choice["finish_reason"], choice.get("stop_reason")
                self._close()
        return self._take()

    def comment(self, text: bytes) -> bytes:
        """A ping, once there is a message that it can belong to."""
        return sse.encode(b'{"type":"ping"}', b"ping") if self._begun else sse.encode_comment(text)

    def broken(self, content: bytes, name: bytes) -> bytes:
        """The error event."""
        self._broken = True
        told = error(500, content)
        return sse.encode(orjson.dumps(told), b"error")

    def end(self) -> bytes:
        """The stop reason, the counts, and the message's end."""
        if self._broken:
            return b""
        if self._finish in UNFINISHED:
            return self.broken(wire.envelope(502, GIVEN_UP), b"")
        self._close()
        self._event("message_delta", delta=self._end(), usage=self._counts())
        self._event("message_stop")
        return self._take()

    # blocks of a stream

    def _flow(self, kind: str, more: str) -> None:
        if not more:
            return
        if self._open != kind:
            self._stop_block()
            empty = {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
            self._start_block({"type": kind, **empty})
            self._open = kind
        self._event("content_block_delta", index=self._count - 1, delta={"type": f"{kind}_delta", kind: more})

    def _close(self) -> None:
        """End the open block, and tell the calls."""
        self._stop_block()
        calls, self._calls = self._calls, {}
        self._called_any = self._called_any or bool(calls)
        for _, call in sorted(calls.items()):
            block = _tool_use(call)
            self._start_block({**block, "input": {}})
            told = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
            self._event("content_block_delta", index=self._count - 1, delta=told)
            self._open = "tool_use"
            self._stop_block()

    def _start_block(self, block: dict[str, Any]) -> None:
        self._event("content_block_start", index=self._count, content_block=block)
        self._count += 1

    def _stop_block(self) -> None:
        if self._open is not None:
            self._event("content_block_stop", index=self._count - 1)
            self._open = None

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append(sse.encode(orjson.dumps({"type": kind, **fields}), kind.encode()))

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    # the message

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _end(self) -> dict[str, Any]:
        if self._called_any and self._finish in (None, "stop"):  # engines say "stop" of a call that was forced
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(self._stop, str) and self._finish == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        reason = "refusal" if self._refused else STOPS.get(self._finish or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _counts(self) -> dict[str, Any]:
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {
            "input_tokens": (self._usage.get("prompt_tokens") or 0) - cached,
            "output_tokens": self._usage.get("completion_tokens") or 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    written = function.get("arguments") or "{}"
    try:
        is_object = isinstance(orjson.loads(written), dict)
    except ValueError:
        is_object = False
    # as it was written: numbers that do not fit into 64 bits would not come back
    given = orjson.Fragment(written) if is_object else {"INVALID_JSON": written}
    name = call.get("id") or f"toolu_{uuid.uuid4().hex}"
    return {"type": "tool_use", "id": name, "name": function.get("name") or "", "input": given}
