"""The proxy: calls of models in every dialect, and the list of models, for whoever the server has identified.

    proxy = Proxy(engine, store, policy=policies, limits=Limits())
    for door in proxy.doors.all: ...  # mount door.answer(request, identity) at door.path

There is one upstream, the engine it was made with: nothing in a request can choose another, and no other route of
the engine can be reached through here. It refuses to authenticate: the identity is the server's word.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Literal

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from art_backends.config import Limits
from art_backends.errors import EngineError, TemplateError
from art_backends.proxy import wire
from art_backends.proxy.chat import Chat
from art_backends.proxy.completions import Completions
from art_backends.proxy.continuation import template_kwargs
from art_backends.proxy.dialect import Dialect, Plain, Writer
from art_backends.proxy.doors import Answer, Counting, Door, Doors
from art_backends.proxy.engine import Engine
from art_backends.proxy.exchange import Exchange
from art_backends.proxy.identity import Identity, RolloutContext, owner_of
from art_backends.proxy.limits import Counters, Gate, Overloaded
from art_backends.proxy.messages import Messages
from art_backends.proxy.observing import Observer
from art_backends.proxy.passthrough import PassThrough
from art_backends.proxy.prefix import Prefixer, Prompt, RolloutIndex
from art_backends.proxy.providers import Providers, Upstream
from art_backends.proxy.recorder import CallStore, Recorder
from art_backends.proxy.responses import Responses
from art_backends.proxy.responses.memory import Memory
from art_backends.proxy.services import PolicyView, Services
from art_backends.proxy.tail import Vocabulary

log = logging.getLogger(__name__)

Keep = Callable[[dict[str, Any], dict[str, str]], Awaitable[RolloutContext | None]]

LONGEST = 3  # calls in flight that the status names

_CLIENT_GONE = 499  # nobody reads it; the word is nginx's


class EngineRenderer:
    """The engine's /tokenize and /detokenize as the exact prefixes need them."""

    def __init__(self, engine: Engine) -> None:
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
        shown = [_with_reasoning(message) for message in messages]
        body: dict[str, Any] = {"messages": shown, "add_generation_prompt": add_generation_prompt}
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


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both names: vLLM reads either in a chat, one when asked for the tokens."""
    found = message.get("reasoning") or message.get("reasoning_content")
    return message if found is None else {**message, "reasoning": found, "reasoning_content": found}


class Proxy:
    """See the module. Lives in one event loop."""

    def __init__(
        self,
        engine: Engine,
        store: CallStore,
        *,
        policy: PolicyView,
        limits: Limits | None = None,
        providers: Providers | None = None,
        defaults: Mapping[str, float] | None = None,
        keep_reasoning: bool = True,
        tools_by_grammar: bool = False,
    ) -> None:
        """``defaults``: what the engine samples with where a request is silent. ``keep_reasoning``: whether an answer
        with reasoning may stand in a later prompt as it was sampled (see ``prefix.Prefixer``). The server asks the
        engine for both. ``tools_by_grammar``: it is vLLM (see ``wire.tools_by_grammar``).
        """
        self.limits = limits or Limits()
        self._keep_reasoning = keep_reasoning
        self.counters = Counters()
        self._engine = engine
        self._policy = policy
        self._providers = providers or Providers()
        self._gate = Gate(self.limits, self.counters)
        self._recorder = Recorder(store, self.limits, self.counters)
        self._prefixers: dict[str, Prefixer] = {}
        self._renderer = EngineRenderer(engine)
        self._observer = Observer(self.snapshot)
        self._memory = Memory()
        self.ready: Callable[[], Awaitable[None]] = _at_once  # the server's: EngineError while the engine is away
        self.keep: Keep | None = None  # the server's: the rollout that a call of no open rollout is kept in
        self._services = Services(
            engine=engine,
            recorder=self._recorder,
            policy=policy,
            prompter=self._prompt,
            gate=self._gate,
            limits=self.limits,
            counters=self.counters,
            observer=self._observer,
            defaults=dict(defaults or {}),
            tools_by_grammar=tools_by_grammar,
        )
        self.doors = Doors(self._doors())

    def _doors(self) -> Iterator[Door]:
        chat, completions = Plain("chat", Chat()), Plain("completions", Completions())
        responses, messages = Responses(self._memory), Messages()
        untranslated: dict[str, Dialect] = {"chat/completions": chat, "completions": completions}
        for base in ("/v1", "/openai/v1", "/openai"):  # the latter two: Azure's
            for path, dialect in untranslated.items():
                answer = self._calls(path, dialect)
                if base != "/openai":
                    yield Door("POST", f"{base}/{path}", answer, dialect)
                if base != "/openai/v1":  # an Azure client that was given OpenAI's address asks below /v1
                    yield Door("POST", f"{base}/deployments/{{model:path}}/{path}", answer, dialect)
            yield Door("POST", f"{base}/responses", self._calls("responses", responses), responses)
            yield Door("POST", f"{base}/responses/input_tokens", self._counts(responses), responses)
            yield Door("GET", f"{base}/responses/{{id}}", responses.retrieve, responses)
            yield Door("DELETE", f"{base}/responses/{{id}}", responses.delete, responses)
            yield Door("GET", f"{base}/models", self._models, chat)
            yield Door("GET", f"{base}/models/{{model:path}}", self._models, chat)
        yield Door("POST", "/v1/messages", self._calls("messages", messages), messages)
        yield Door("POST", "/v1/messages/count_tokens", self._counts(messages), messages)

    async def _models(self, request: Request, identity: Identity) -> Response:
        """The list of models and, with a path parameter ``model``, one of them."""
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
        self._memory.forget_all(owner_of(rollout_id))

    def engine_changed(self) -> None:
        """The engine was restarted or replaced: learn its tokenizer anew."""
        self._engine.forget_tokenizer()
        self._prefixers.clear()

    async def drain(self, seconds: float) -> bool:
        """Refuse new calls with 503, wait for those in flight. False if some were left after ``seconds``."""
        return await self._gate.drain(seconds)

    def closed(self) -> AbstractAsyncContextManager[None]:
        """Within it no call is in flight, and new ones wait: none fails."""
        return self._gate.closed()

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
            **self._engine.figures(),
            "in_flight": self._gate.inside,
            "waiting": self._gate.waiting,
            "oldest": [{"rollout": rollout, "seconds": now - began} for rollout, began in longest],
        }

    def metrics(self) -> bytes:
        """Counters, gauges and durations in Prometheus' text form (``observing.CONTENT_TYPE``)."""
        return self._observer.text()

    # inside

    def _calls(self, path: str, dialect: Dialect) -> Answer:
        """A model is called: the policy's, or a provider's at ``/v1/path``."""

        async def answer(request: Request, identity: Identity) -> Response:
            headers = list(request.headers.items())
            asked = await self._body(request)
            upstream = self._upstream(asked["model"], dialect)
            if upstream is not None:
                return PassThrough(
                    self._services,
                    upstream=upstream,
                    dialect=dialect,
                    identity=await self._kept(identity, asked, headers),
                    path=f"/v1/{path}",
                    body=asked,
                    headers=headers,
                )
            body, writer = _read(dialect, asked, identity.owner)
            body = wire.bounded(body, dialect.endpoint.token_limits, self.limits.answer_tokens)
            await self.ready()
            return Exchange(
                self._services,
                dialect=dialect,
                identity=await self._kept(identity, asked, headers),
                body=body,
                writer=writer,
                headers=headers,
            )

        return self._answered(answer, dialect)

    async def _kept(self, identity: Identity, asked: dict[str, Any], headers: list[tuple[str, str]]) -> Identity:
        """The caller with the rollout that an app's call is kept in, if it is."""
        if self.keep is None or identity.rollout is not None:
            return identity
        context = await self.keep(asked, dict(headers))
        return identity if context is None else replace(identity, rollout=context)

    def _counts(self, dialect: Counting) -> Answer:
        """The tokens of a prompt are counted: as they are rendered, whatever a rollout has sampled before."""

        async def answer(request: Request, identity: Identity) -> Response:
            asked = await self._body(request)
            if self._upstream(asked["model"], dialect) is not None:
                raise wire.BadRequestError("the tokens of a provider's model cannot be counted here", param="model")
            body, _ = _read(dialect, {"max_tokens": 1, **asked}, identity.owner)
            return _json(200, dialect.counted(await self._count(body)))

        return self._answered(answer, dialect)

    def _answered(self, work: Answer, dialect: Dialect) -> Answer:
        """``work`` with an answer in the client's dialect for what it raises."""

        async def answer(request: Request, identity: Identity) -> Response:
            try:
                return await work(request, identity)
            except wire.BadRequestError as error:
                self.counters.refused_bad += 1
                envelope = wire.envelope(error.status, str(error), param=error.param, code=error.code)
                return _json(error.status, dialect.refused(error.status, envelope))
            except EngineError as error:
                self.counters.errors += 1
                content = dialect.refused(error.status, wire.envelope(error.status, str(error), code=error.code))
                headers = {"retry-after": "5"} if error.status in (429, 503) else None
                return Response(content, error.status, headers, "application/json")
            except ClientDisconnect:
                self.counters.cancelled += 1
                return Response(status_code=_CLIENT_GONE)

        return answer

    async def _count(self, body: dict[str, Any]) -> int:
        """The tokens of a chat request's prompt. BadRequestError; EngineError, also if there is no place or no time."""
        await self.ready()
        try:
            async with self._gate, asyncio.timeout(self.limits.first_byte_seconds):
                prompt = await self._prompt(body, "template", None)
                kwargs = template_kwargs(body)
                return len(await self._renderer.tokenize(prompt.messages, prompt.tools, chat_template_kwargs=kwargs))
        except TemplateError as error:
            raise wire.BadRequestError(str(error), param="messages") from error
        except TimeoutError:
            raise EngineError("the engine did not answer in time", 504, "deadline") from None
        except Overloaded as error:
            raise EngineError(str(error), error.status, "overloaded") from error

    async def _body(self, request: Request) -> dict[str, Any]:
        """The request's body, checked as far as all dialects are alike."""
        given = await self._read(request)
        deployment = request.path_params.get("model")
        if deployment is not None and isinstance(given, dict):  # Azure's: whatever model the body names
            given["model"] = deployment
        return wire.check_body(given, n_limit=self.limits.n)

    def _upstream(self, model: str, dialect: Dialect) -> Upstream | None:
        """The provider that a model's calls go to; None where the policy answers for it. BadRequestError if nobody."""
        claimed = self._policy.claims(model)
        upstream = None if claimed else self._providers.find(model, dialect.form)
        if upstream is not None or self._policy.answers(model):
            return upstream
        formats = "" if claimed else " and ".join(self._providers.formats(model))
        why = f"its provider is asked in {formats}'s format only" if formats else "no policy answers for it"
        raise wire.BadRequestError(
            f"the model {model!r} does not exist: {why}", status=404, param="model", code="model_not_found"
        )

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
                self._renderer,
                eos_ids=vocabulary.eos_ids,
                special_tokens=vocabulary.special_tokens,
                history=kind,
                keep_reasoning=self._keep_reasoning,
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


async def _at_once() -> None:
    return


def _read(dialect: Dialect, asked: dict[str, Any], owner: str) -> tuple[dict[str, Any], Writer]:
    """The endpoint's request and the writer of its answer; whatever is odd about a request is a BadRequestError."""
    try:
        body, writer = dialect.read(asked, owner)
        dialect.endpoint.check(body)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise wire.BadRequestError(f"the request has an unknown shape: {error}") from error
    return body, writer


def _json(status: int, content: bytes) -> Response:
    return Response(content, status_code=status, media_type="application/json")


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Response:
    return _json(status, wire.envelope(status, message, param=param, code=code))
