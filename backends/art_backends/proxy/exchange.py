"""One call from request to answer, whatever its dialect: gate, intent, prompt, engine, outcome, answer.

When the client goes away, the request to the engine is aborted and the call recorded as cancelled. The end of an answer
(the whole reply, or the last chunk and what ends a stream) is sent only after the outcome is durable, so an agent that
goes on has a recorded past.

It refuses to send anything twice (``replicas`` may, as long as nothing of an answer has come), to hide a failure (a
broken stream ends with an error event and a closed connection, never with ``[DONE]``), and to let trouble of the
capture reach the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson
from starlette.types import Send

from art_backends.errors import EngineError
from art_backends.proxy import sse, wire
from art_backends.proxy.attended import StuckClientError
from art_backends.proxy.dialect import Dialect, Writer
from art_backends.proxy.engine_client import EngineStream, parse_json
from art_backends.proxy.identity import Identity
from art_backends.proxy.outcome import Assembler, Outcome
from art_backends.proxy.placed import Placed
from art_backends.proxy.prefix import Prompt
from art_backends.proxy.services import Services
from art_backends.trajectories import CallStatus, CaptureLevel, PromptMode, Sampling

log = logging.getLogger(__name__)

_ERROR_TEXT = 1000  # characters of an engine's error kept in the record


class _MalformedError(ValueError):
    """The engine's answer is not what its status and type say."""


class Exchange(Placed):
    """See the module. ``body`` is the endpoint's request that the dialect has read, ``writer`` what came with it."""

    def __init__(
        self,
        services: Services,
        *,
        dialect: Dialect,
        identity: Identity,
        body: dict[str, Any],
        writer: Writer,
        headers: list[tuple[str, str]],
    ) -> None:
        super().__init__(services, dialect=dialect, identity=identity, body=body, headers=headers)
        self._endpoint = dialect.endpoint
        self._writer = writer
        self._asked = dialect.endpoint.asked(body)
        self._assembler = Assembler(self._asked.n)
        self._unreadable: BaseException | None = None
        self._prompt_facts: dict[str, Any] = {}

    # the way of a call

    async def _attend(self, send: Send) -> None:
        services, context = self._services, self._context
        services.counters.calls += 1
        if context is None:
            services.counters.unattributed += 1
        # no await between choosing a version and leasing it: it cannot be unloaded in between
        version = services.policy.version_of(self._asked.model) if context is None else context.version
        self._observed.belongs(None if context is None else context.id, version)
        with services.policy.lease(version) as model:
            try:
                if context is not None:
                    recording = await self._begin(context, self._sampling(model))
                    services.counters.constrained += recording.call.sampling.constrained
                await self._ask(send, model)
            except asyncio.CancelledError:
                if not self._delivered:
                    services.counters.cancelled += 1
                    await asyncio.shield(self._finish(CallStatus.CANCELLED))
                raise
            except Exception as error:  # boundary: whatever goes wrong in here, the call gets an outcome
                log.exception("a call failed in the proxy")
                await self._fail(send, 500, f"the proxy failed: {type(error).__name__}", "internal_error")
            finally:
                if self._recording is not None:
                    services.recorder.end(self._recording)

    def _sampling(self, model: str) -> Sampling:
        """The sampling parameters in force."""
        sent = self._shape(model, None)
        sampling = self._endpoint.sampling(sent)
        if self._services.tools_by_grammar and wire.tools_by_grammar(sent):
            return sampling.model_copy(update={"constrained": True})
        return sampling

    def _shape(self, model: str, prompt: Prompt | None) -> dict[str, Any]:
        context = self._context
        sent = self._endpoint.shape(
            self._request,
            model=model,
            captured=context is not None,
            overrides=None if context is None else context.sampling(),
            prompt=prompt,
        )
        if context is not None:  # said in so many words, so that what is recorded is what is in force
            sent.update({name: value for name, value in self._services.defaults.items() if sent.get(name) is None})
        return sent

    async def _ask(self, send: Send, model: str) -> None:
        services, limits = self._services, self._services.limits
        try:
            async with asyncio.timeout(limits.first_byte_seconds):
                prompt = await self._prompt()
            sent = self._shape(model, prompt)
            rollout = None if self._context is None else self._context.id
            headers = wire.request_headers(self._request_headers, rollout)
            headers += self._observed.onward()
            async with services.engine.open(
                self._endpoint.path,
                orjson.dumps(sent),
                headers,
                first_byte_seconds=limits.first_byte_seconds,
                affinity=rollout,
            ) as reply:
                async with asyncio.timeout(limits.total_seconds):
                    if reply.status == 200 and reply.is_events:
                        await self._stream(send, reply)
                    else:
                        await self._whole(send, reply)
                await reply.drain()
        except wire.BadRequestError as error:
            services.counters.refused_bad += 1
            await self._fail(send, error.status, str(error), "bad_request")
        except StuckClientError:
            services.counters.cancelled += 1
            await self._finish(CallStatus.CANCELLED)
        except TimeoutError:
            services.counters.deadlines += 1
            await self._fail(send, 504, "the engine did not answer in time", "deadline")
        except EngineError as error:
            await self._fail(send, error.status, str(error), error.code)
        except (_MalformedError, sse.EventTooLargeError) as error:
            await self._fail(send, 502, str(error), "malformed_reply")

    async def _prompt(self) -> Prompt | None:
        if not self._endpoint.has_messages:
            return None
        services, recording = self._services, self._recording
        history = "exact" if self._context is None else self._context.history
        earlier = None if recording is None else services.recorder.index(recording)
        prompt = await services.prompter(self._request, history, earlier)
        services.counters.broken_control_tokens += prompt.broken_control_tokens
        services.counters.drifted += prompt.drifted
        services.counters.exact += prompt.mode is PromptMode.EXACT
        self._prompt_facts = {
            "prompt_mode": prompt.mode,
            "continues": prompt.continues,
            "drifted": prompt.drifted,
            "broken_control_tokens": prompt.broken_control_tokens,
        }
        if prompt.drifted:
            log.info("a call's earlier tokens could not be kept: %s", prompt.reason)
        if recording is not None and prompt.continues is not None:
            services.recorder.continued(recording, prompt.continues)
        return prompt

    # answers

    async def _whole(self, send: Send, reply: EngineStream) -> None:
        content = await reply.read()
        if reply.status != 200:
            self._services.counters.errors += 1
            await self._finish(CallStatus.ERROR, error=_error_text(reply.status, content))
            status = 502 if 300 <= reply.status < 400 else reply.status
            refused = self._dialect.refused(status, content)
            await self._answer(send, status, wire.reply_headers(reply.headers), refused)
            return
        data = _parse(content)
        self._observe(data)
        with _shape_expected():
            written = self._writer.whole(self._endpoint.reply(data, self._asked))
        await self._finish_ok()
        await self._answer(send, 200, wire.reply_headers(reply.headers), written)

    async def _stream(self, send: Send, reply: EngineStream) -> None:
        await self._start(send, 200, wire.reply_headers(reply.headers))
        held: list[bytes] = []  # from a choice's last chunk on: sent when the outcome is durable
        ended: set[int] = set()  # choices whose last chunk is held
        failure: str | None = None
        while (events := await reply.next_events(self._services.limits.idle_seconds)) is not None:
            out: list[bytes] = []
            for event in events:
                if event.data is None:
                    out.append(self._writer.comment(event.comment))
                    continue
                if event.data == sse.DONE:
                    if failure is None:
                        await self._finish_ok()
                    else:
                        await self._finish(CallStatus.ERROR, error=failure)
                    await self._send_last(send, b"".join([*out, *held, self._writer.end()]))
                    return
                data = _parse(event.data)
                if data.get("error"):
                    self._services.counters.errors += 1
                    failure = _error_text(200, event.data)
                    out += [*held, self._writer.broken(event.data, event.name)]
                    held = []
                    continue
                self._observe(data)
                with _shape_expected():
                    last = _last(data, ended)
                    chunk = self._endpoint.chunk(data, self._asked)
                    if chunk is not None:
                        (held if last else out).append(self._writer.chunk(chunk, event.name))
            if any(out):
                await self._send_part(send, b"".join(out))
        if failure is None:
            raise EngineError("the engine's stream ended before [DONE]", 502, "stream_interrupted")
        self._services.counters.interrupted += 1
        await self._finish(CallStatus.ERROR, error=failure)
        self._delivered = True  # the error was told; without a last part the connection is cut

    def _observe(self, data: dict[str, Any]) -> None:
        if self._recording is None or self._unreadable is not None:
            return
        try:
            self._assembler.add(data)
        except Exception as error:  # noqa: BLE001 - boundary: the agent gets its answer, read by us or not
            self._unreadable = error

    async def _finish_ok(self) -> None:
        if self._recording is None:
            self._services.counters.apps += self._identity.rollout is None
            return
        outcome = None if self._unreadable is not None else self._outcome()
        if outcome is None:
            assert self._unreadable is not None
            self._services.recorder.lost(self._recording, "answer", self._unreadable)
            await self._finish(CallStatus.OK, excluded="unreadable")
            return
        facts = {
            "prompt_token_ids": outcome.prompt_token_ids,
            "choices": outcome.choices,
            "capture": outcome.capture,
        }
        if outcome.complete:
            await self._finish(CallStatus.OK, **facts)
        else:
            self._services.counters.errors += 1
            facts["capture"] = CaptureLevel.TEXT
            await self._finish(CallStatus.ERROR, error="the answer lacks choices or their finish reasons", **facts)

    def _outcome(self) -> Outcome | None:
        try:
            return self._assembler.outcome()
        except (TypeError, ValueError) as error:  # parts that do not fit together, such as places of choices
            self._unreadable = error
            return None

    async def _finish(self, status: CallStatus, **changes: Any) -> None:
        if self._recording is not None:
            await self._services.recorder.finish(self._recording, status, **self._prompt_facts, **changes)

    async def _fail(self, send: Send, status: int, message: str, code: str) -> None:
        """The engine failed us. Before the status line: an error reply. After it: an error event, then a cut."""
        if self._started:
            self._services.counters.interrupted += 1
        else:
            self._services.counters.errors += 1
        await self._finish(CallStatus.ERROR, error=f"{code}: {message}"[:_ERROR_TEXT])
        content = wire.envelope(status, message, code=code)
        if not self._started:
            headers = [(b"retry-after", b"1")] if status == 503 else []
            await self._answer(send, status, headers, self._dialect.refused(status, content))
            return
        # Returning without a last body part makes the server close the connection: no client can take this for an end.
        with suppress(StuckClientError):
            await self._send_part(send, self._writer.broken(content, b""))
        self._delivered = True


def _parse(content: bytes) -> dict[str, Any]:
    try:
        data = parse_json(content)
    except ValueError:
        raise _MalformedError("the engine's answer is not JSON") from None
    if not isinstance(data, dict):
        raise _MalformedError("the engine's answer is no JSON object")
    return data


@contextmanager
def _shape_expected() -> Iterator[None]:
    try:
        yield
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise _MalformedError(f"the engine's answer has an unknown shape: {error}") from None


def _last(data: dict[str, Any], ended: set[int]) -> bool:
    """Whether a chunk belongs to the end: it finishes a choice, comes after that, or concerns no choice."""
    choices = data.get("choices")
    if not choices:
        return bool(ended)
    last = False
    for choice in choices:
        index = choice.get("index") or 0
        if choice.get("finish_reason") is not None:
            ended.add(index)
        last = last or index in ended
    return last


def _error_text(status: int, content: bytes) -> str:
    try:
        error = parse_json(content)["error"]
        text = error if isinstance(error, str) else f"{error.get('code') or error.get('type')}: {error.get('message')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        text = content[:_ERROR_TEXT].decode(errors="replace")
    return f"{status} {text}"[:_ERROR_TEXT]
