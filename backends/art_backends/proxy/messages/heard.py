"""A message of a provider, as a chat message for the record. It refuses to understand blocks of hosted tools."""

from __future__ import annotations

from typing import Any

import orjson

from art_backends.proxy.messages.reply import STOPS
from art_backends.proxy.messages.request import assistant
from art_backends.trajectories import Choice

_GROWS = {"text_delta": "text", "thinking_delta": "thinking"}
_FINISHES = {stop: finish for finish, stop in reversed(STOPS.items())} | {"stop_sequence": "stop"}
_FINISHES["tool_use"] = "tool_calls"


class Heard:
    """Hears a whole message, or the events of a stream."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._inputs: dict[int, str] = {}
        self._stop: str | None = None

    def whole(self, content: bytes) -> None:
        """The message object."""
        message = orjson.loads(content)
        self._blocks, self._stop = message["content"], message["stop_reason"]

    def event(self, data: bytes) -> None:
        """An event of a stream."""
        event = orjson.loads(data)
        kind = event.get("type")
        if kind == "content_block_start":
            self._blocks.append(event["content_block"])
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] in _GROWS:
                self._blocks[event["index"]][_GROWS[delta["type"]]] += delta[_GROWS[delta["type"]]]
            elif delta["type"] == "input_json_delta":
                self._inputs[event["index"]] = self._inputs.get(event["index"], "") + delta["partial_json"]
        elif kind == "message_delta":
            self._stop = event["delta"].get("stop_reason")

    def choices(self) -> list[Choice]:
        """The one message, once it was whole."""
        if self._stop is None:
            return []
        for index, written in self._inputs.items():
            self._blocks[index]["input"] = orjson.loads(written or "{}")
        said = assistant(self._blocks, "the answer")
        return [Choice(index=0, message=said, finish_reason=_FINISHES.get(self._stop, "stop"))]
