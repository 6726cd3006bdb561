"""The proxy's door: chat completions, completions and the list of models, for whoever the server has identified.

    proxy = Proxy(engine, store, policy=policies, limits=Limits())
    response = await proxy.chat_completions(request, identity)

There is one upstream, the engine it was made with: nothing in a request can choose another, and no other route of
the engine can be reached through here. It refuses to authenticate: the identity is the server's word.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Literal

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from art_backends.errors import EngineError, TemplateError
from art_backends.proxy import wire
from art_backends.proxy.chat import Chat
from art_backends.proxy.completions import Completions
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.exchange import Exchange
from art_backends.proxy.identity import Identity
from art_backends.proxy.limits import Counters, Gate, Limits
from art_backends.proxy.prefix import Prefixer, Prompt, RolloutIndex
from art_backends.proxy.recorder import CallStore, Recorder
from art_backends.proxy.services import Dialect, PolicyView, Services
from art_backends.proxy.tail import Vocabulary

log = logging.getLogger(__name__)

LONGEST = 3  # calls in flight that the status names

_CLIENT_GONE = 499  # nobody reads it; the word is nginx's


class EngineRenderer:
    """The engine's /tokenize and /detokenize as the exact prefixes need them."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def tokenize(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids that the engine's template renders. TemplateError if it does not take them, EngineError otherwise."""
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        if tools:
            body["tools"] = tools
        if chat_template_kwargs:
            body["chat_template_kwargs"] = chat_template_kwargs
        try:
            reply = await self._engine.tokenize(body)
        except EngineError as error:
            if error.status in (400, 422):
                raise TemplateError(str(error)) from error
            raise
        if reply is None:
            raise EngineError("the engine has no /tokenize", 501, "no_tokenize")
        return list(reply["tokens"])

    async def detokenize(self, ids: list[int]) -> str:
        """Text of ids, control tokens included. EngineError if the engine cannot say."""
        text = await self._engine.detokenize(ids)
        if text is None:
            raise EngineError("the engine has no /detokenize", 501, "no_detokenize")
        return text


class Proxy:
    """See the module. Lives in one event loop."""

    def __init__(
        self, engine: EngineClient, store: CallStore, *, policy: PolicyView, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.counters = Counters()
        self._engine = engine
        self._policy = policy
        self._gate = Gate(self.limits, self.counters)
        self._recorder = Recorder(store, self.limits, self.counters)
        self._prefixers: dict[str, Prefixer] = {}
        self._services = Services(
            engine=engine,
            recorder=self._recorder,
            policy=policy,
            prompter=self._prompt,
            gate=self._gate,
            limits=self.limits,
            counters=self.counters,
        )
        self._chat: Dialect = Chat()
        self._completions: Dialect = Completions()

    # what the server mounts

    async def chat_completions(self, request: Request, identity: Identity) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._exchange(request, identity, self._chat)

    async def completions(self, request: Request, identity: Identity) -> Response:
        """``POST /v1/completions``."""
        return await self._exchange(request, identity, self._completions)

    async def models(self, request: Request, identity: Identity) -> Response:
        """``GET /v1/models`` and, with a path parameter ``model``, ``GET /v1/models/NAME``."""
        names = dict.fromkeys([self._policy.name, *self._policy.models])
        items = [{"id": name, "object": "model", "created": 0, "owned_by": "art-backends"} for name in names]
        wanted = request.path_params.get("model")
        if wanted is None:
            return _json(200, orjson.dumps({"object": "list", "data": items}))
        for item in items:
            if item["id"] == wanted:
                return _json(200, orjson.dumps(item))
        return _error(404, f"the model {wanted!r} does not exist", code="model_not_found")

    # what the server calls

    def forget(self, rollout_id: str) -> None:
        """A rollout has closed (set ``closed`` on its context first): drop what is kept of it in memory."""
        self._recorder.forget(rollout_id)

    def engine_changed(self) -> None:
        """The engine was restarted or replaced: learn its tokenizer anew."""
        self._engine.forget_tokenizer()
        self._prefixers.clear()

    async def drain(self, seconds: float) -> bool:
        """Refuse new calls with 503, wait for those in flight. False if some were left after ``seconds``."""
        return await self._gate.drain(seconds)

    @property
    def in_flight(self) -> int:
        """Calls that hold a place now."""
        return self._gate.inside

    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges."""
        now = time.monotonic()
        longest = sorted(self._services.running.values(), key=lambda call: call[1])[:LONGEST]
        return {
            **self.counters.snapshot(),
            "in_flight": self._gate.inside,
            "waiting": self._gate.waiting,
            "oldest": [{"rollout": rollout, "seconds": now - began} for rollout, began in longest],
        }

    # inside

    async def _exchange(self, request: Request, identity: Identity, dialect: Dialect) -> Response:
        try:
            body = wire.check_body(await self._read(request), n_limit=self.limits.n)
            dialect.check(body)
            if not self._policy.answers(body["model"]):
                raise wire.BadRequestError(
                    f"the model {body['model']!r} does not exist: no policy answers for it",
                    status=404,
                    param="model",
                    code="model_not_found",
                )
        except wire.BadRequestError as error:
            self.counters.refused_bad += 1
            return _error(error.status, str(error), param=error.param, code=error.code)
        except ClientDisconnect:
            self.counters.cancelled += 1
            return Response(status_code=_CLIENT_GONE)
        return Exchange(self._services, dialect, identity, body, list(request.headers.items()))

    async def _read(self, request: Request) -> Any:
        limit = self.limits.body_bytes
        too_large = wire.BadRequestError(f"the request exceeds {limit} bytes", status=413, code="request_too_large")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise wire.BadRequestError("compressed requests are not accepted", status=415)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise wire.BadRequestError("the request did not arrive in time", status=408) from None
        return wire.decode_body(b"".join(parts))

    async def _prompt(self, body: dict[str, Any], history: str, earlier: RolloutIndex | None) -> Prompt:
        prefixer = self._prefixers.get(history)
        if prefixer is None:
            vocabulary = Vocabulary.of(await self._engine.tokenizer_info())
            kind: Literal["exact", "template"] = "template" if history == "template" else "exact"
            prefixer = self._prefixers[history] = Prefixer(
                EngineRenderer(self._engine),
                eos_ids=vocabulary.eos_ids,
                special_tokens=vocabulary.special_tokens,
                history=kind,
            )
        if earlier is not None:
            try:
                return await prefixer.prompt(body, earlier)
            except Exception:  # boundary: a prompt that cannot be continued is sent as a new one
                log.exception("an exact prompt could not be made")
        try:
            return await prefixer.prompt(body, ())
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise wire.BadRequestError(f"messages or tools cannot be read: {error}", param="messages") from error


def _json(status: int, content: bytes) -> Response:
    return Response(content, status_code=status, media_type="application/json")


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Response:
    return _json(status, wire.envelope(status, message, param=param, code=code))
