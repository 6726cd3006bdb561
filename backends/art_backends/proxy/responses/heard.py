"""A response of a provider, as a chat message for the record. It refuses to understand what is no text and no call."""

from __future__ import annotations

from typing import Any

import orjson

from art_backends.proxy.responses.reply import as_message
from art_backends.trajectories import Choice

_ENDS = {"response.completed": "stop", "response.incomplete": "length"}


class Heard:
    """Hears a whole response, or the last event of a stream, which has the response."""

    def __init__(self) -> None:
        self._choices: list[Choice] = []

    def whole(self, content: bytes) -> None:
        """The response object."""
        self._take(orjson.loads(content))

    def event(self, data: bytes) -> None:
        """An event of a stream."""
        event = orjson.loads(data)
        if event.get("type") in _ENDS:
            self._take(event["response"])

    def choices(self) -> list[Choice]:
        """The one message, once it was whole."""
        return self._choices

    def _take(self, response: dict[str, Any]) -> None:
        finish = _ENDS.get(f"response.{response.get('status')}")
        if finish is not None:
            said = as_message(response["output"])
            finish = "tool_calls" if "tool_calls" in said and finish == "stop" else finish
            self._choices = [Choice(index=0, message=said, finish_reason=finish)]
