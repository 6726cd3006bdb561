"""OpenAI's Responses, as a dialect over chat completions: ``request`` reads, ``reply`` writes, ``memory`` remembers.

Text, reasoning, function tools, structured output and images as data are translated both ways, streaming or not.
``previous_response_id`` goes on from what this server remembers; nothing is written to disk for it, and a rollout's
responses are that rollout's alone.

It refuses, by name, what runs on OpenAI's own servers: hosted tools, conversations, prompts, files, background work.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from art_backends.proxy import wire
from art_backends.proxy.chat import Chat
from art_backends.proxy.dialect import Endpoint, Listener, Writer
from art_backends.proxy.identity import Identity
from art_backends.proxy.responses import request as reading
from art_backends.proxy.responses.heard import Heard
from art_backends.proxy.responses.memory import Memory
from art_backends.proxy.responses.reply import Reply


class Responses:
    """The dialect of ``/v1/responses``."""

    name = "responses"
    form = "openai"
    endpoint: Endpoint

    def __init__(self, memory: Memory | None = None) -> None:
        self.endpoint = Chat()
        self._memory = memory or Memory()

    def read(self, body: dict[str, Any], owner: str) -> tuple[dict[str, Any], Writer]:
        """The chat completion for a response, and the writer of the response."""
        chat, said = reading.chat_request(body, self._memory, owner)
        keep = None if body.get("store") is False else self._memory.keeper(owner, said)
        return chat, Reply(body, keep)

    def refused(self, status: int, content: bytes) -> bytes:
        """The error as it is: the envelope is the same."""
        return content

    def listener(self) -> Listener:
        """For one answer of a provider."""
        return Heard()

    def counted(self, tokens: int) -> bytes:
        """The answer to ``/v1/responses/input_tokens``."""
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, request: Request, identity: Identity) -> Response:
        """``GET /v1/responses/ID``."""
        found = self._memory.response(identity.owner, request.path_params["id"])
        return _unknown(request) if found is None else _json(found)

    async def delete(self, request: Request, identity: Identity) -> Response:
        """``DELETE /v1/responses/ID``."""
        name = request.path_params["id"]
        if not self._memory.forget(identity.owner, name):
            return _unknown(request)
        return _json({"id": name, "object": "response", "deleted": True})


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _unknown(request: Request) -> Response:
    message = f"there is no response {request.path_params['id']!r} here: {Memory.LIMITS}"
    content = wire.envelope(404, message, param="response_id", code="response_not_found")
    return Response(content, 404, media_type="application/json")
