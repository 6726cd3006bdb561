"""Anthropic's Messages, as a dialect over chat completions: ``request`` reads, ``reply`` writes.

Text, thinking, tools of the app's own, tool results, structured output and images as data are translated both ways,
streaming or not; tokens are counted by the engine's own template.

It refuses, by name, what runs on Anthropic's servers (hosted tools, files, containers) and media at an address.
"""

from __future__ import annotations

from typing import Any

import orjson

from art_backends.proxy.chat import Chat
from art_backends.proxy.dialect import Endpoint, Listener, Writer
from art_backends.proxy.messages import reply
from art_backends.proxy.messages.heard import Heard
from art_backends.proxy.messages.request import chat_request


class Messages:
    """The dialect of ``/v1/messages``."""

    name = "messages"
    form = "anthropic"
    endpoint: Endpoint

    def __init__(self) -> None:
        self.endpoint = Chat(stop_reason=True)

    def read(self, body: dict[str, Any], owner: str) -> tuple[dict[str, Any], Writer]:
        """The chat completion for a message, and the writer of the message."""
        return chat_request(body), reply.Reply(body["model"])

    def refused(self, status: int, content: bytes) -> bytes:
        """The error in Anthropic's envelope."""
        return orjson.dumps(reply.error(status, content))

    def listener(self) -> Listener:
        """For one answer of a provider."""
        return Heard()

    def counted(self, tokens: int) -> bytes:
        """The answer to ``/v1/messages/count_tokens``."""
        return orjson.dumps({"input_tokens": tokens})
