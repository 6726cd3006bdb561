"""What a client's wire format is to the rest of the proxy; and OpenAI's own two formats, which engines speak as well.

A *dialect* reads a request as one of an *endpoint* of the engine (token ids are told by chat completions and by
completions alone), and gives the *writer* of its answer: what the endpoint says, already without what the app did not
ask for, goes in, and what this client understands comes out, as bytes. Errors are made in OpenAI's envelope everywhere
in the proxy; each dialect writes them in its own.

It refuses to know who asks and whether the call is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from art_backends.proxy import sse
from art_backends.proxy.chat import Asked
from art_backends.proxy.identity import SamplingOverrides
from art_backends.proxy.outcome import Assembler
from art_backends.proxy.prefix import Prompt
from art_backends.trajectories import Choice, Sampling


class Endpoint(Protocol):
    """An endpoint of the engine: what it is asked, and what of its answer the app gets; see ``chat.Chat``."""

    path: str
    has_messages: bool
    token_limits: tuple[str, ...]  # fields that bound an answer's tokens, the newest name first

    def check(self, body: dict[str, Any]) -> None: ...
    def asked(self, body: dict[str, Any]) -> Asked: ...
    def shape(
        self,
        body: dict[str, Any],
        *,
        model: str,
        captured: bool,
        overrides: SamplingOverrides | None,
        prompt: Prompt | None,
    ) -> dict[str, Any]: ...
    def sampling(self, sent: dict[str, Any]) -> Sampling: ...
    def reply(self, data: dict[str, Any], asked: Asked) -> dict[str, Any]: ...
    def chunk(self, data: dict[str, Any], asked: Asked) -> dict[str, Any] | None: ...


class Writer(Protocol):
    """Writes the answer of one request. Whatever an answer's shape raises (TypeError, KeyError, …) is the engine's."""

    def whole(self, data: dict[str, Any]) -> bytes:
        """The body of an answer that is no stream."""
        ...

    def chunk(self, data: dict[str, Any], name: bytes) -> bytes:
        """The events for a chunk of a stream, whose event had this name; empty for none."""
        ...

    def comment(self, text: bytes) -> bytes:
        """What keeps the connection alive."""
        ...

    def broken(self, content: bytes, name: bytes) -> bytes:
        """The event for an error inside a stream, given in OpenAI's envelope."""
        ...

    def end(self) -> bytes:
        """What stands at the end of a stream that was not cut."""
        ...


class Listener(Protocol):
    """Hears an answer that a provider gives in this dialect, as it passes."""

    def whole(self, content: bytes) -> None:
        """The body of an answer that is no stream."""
        ...

    def event(self, data: bytes) -> None:
        """The data of an event of a stream."""
        ...

    def choices(self) -> list[Choice]:
        """What was said, as chat messages; none if the answer was not whole."""
        ...


class Dialect(Protocol):
    """A wire format of clients. ``form`` says whose it is: "openai" or "anthropic"."""

    name: str
    form: str
    endpoint: Endpoint

    def read(self, body: dict[str, Any], owner: str) -> tuple[dict[str, Any], Writer]:
        """The endpoint's request, and the writer of the answer. BadRequestError if it cannot be one.

        ``owner`` is whose request it is: nothing that a dialect remembers is given to another owner.
        """
        ...

    def refused(self, status: int, content: bytes) -> bytes:
        """The body of an error reply, given in OpenAI's envelope."""
        ...

    def listener(self) -> Listener:
        """For one answer of a provider."""
        ...


class Plain:
    """The dialect of an endpoint itself: nothing is translated."""

    form = "openai"

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name = name
        self.endpoint = endpoint

    def read(self, body: dict[str, Any], owner: str) -> tuple[dict[str, Any], Writer]:
        """The request as it is."""
        return body, _AsItIs()

    def refused(self, status: int, content: bytes) -> bytes:
        """The error as it is."""
        return content

    def listener(self) -> Listener:
        """For one answer of a provider."""
        return _Heard()


class _AsItIs:
    def whole(self, data: Mapping[str, Any]) -> bytes:
        return orjson.dumps(data)

    def chunk(self, data: Mapping[str, Any], name: bytes) -> bytes:
        return sse.encode(orjson.dumps(data), name)

    def comment(self, text: bytes) -> bytes:
        return sse.encode_comment(text)

    def broken(self, content: bytes, name: bytes) -> bytes:
        return sse.encode(content, name)

    def end(self) -> bytes:
        return sse.encode(sse.DONE)


class _Heard:
    def __init__(self) -> None:
        self._assembler = Assembler()

    def whole(self, content: bytes) -> None:
        self._assembler.add(orjson.loads(content))

    def event(self, data: bytes) -> None:
        if data != sse.DONE:
            self._assembler.add(orjson.loads(data))

    def choices(self) -> list[Choice]:
        found = self._assembler.outcome().choices
        return found if all(choice.finish_reason is not None for choice in found) else []
