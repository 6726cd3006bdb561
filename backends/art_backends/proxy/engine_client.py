"""The one client of an engine: HTTP over a Unix socket or to a URL, streams included.

Limits are generous (no time limit of its own, any number of connections): deadlines belong to the caller. Nothing is
sent twice here: whether a call may be repeated is for the agent's SDK to decide, or, as long as nothing of its answer
has come, for ``replicas``. Redirects are not followed, cookies and (unless asked for) proxies of the environment are
ignored, replies are asked for uncompressed.

It refuses to interpret the replies of ``/v1/chat/completions``: a status is data, only the lack of a reply raises.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson

from art_backends.errors import EngineError
from art_backends.proxy import sse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
READ_BYTES = 256 * 1024
_HEADER_BYTES = 64 * 1024
_AT_ONCE = 1024 * 1024  # bytes of a request that are sent without a pause
_ABSENT = frozenset({404, 405, 501})


def parse_json(data: bytes) -> Any:
    """JSON as engines write it (NaN included); ValueError if it is none, or none that can be written again."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(data)
            orjson.dumps(value)
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        return value


@dataclass(frozen=True)
class EngineReply:
    """A whole reply: status, headers (names in lower case), body."""

    status: int
    headers: list[tuple[str, str]]
    content: bytes

    def json(self) -> Any:
        """The body as JSON; ValueError if it is none."""
        return parse_json(self.content)


class EngineStream:
    """A reply whose status and headers have arrived, and whose body has not."""

    def __init__(self, response: aiohttp.ClientResponse, *, event_bytes: int, reply_bytes: int) -> None:
        self._response = response
        self._splitter = sse.Splitter(event_bytes)
        self._reply_bytes = reply_bytes
        self._ahead: bytes | None = None  # reads that were only looked at
        self.status = response.status
        self.headers = [(name.lower(), value) for name, value in response.headers.items()]
        self.is_events = response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """The whole body. EngineError if it breaks off or exceeds the limit."""
        parts: list[bytes] = []
        size = 0
        while part := await self.next_read():
            size += len(part)
            if size > self._reply_bytes:
                raise EngineError(f"the engine's reply exceeds {self._reply_bytes} bytes", 502, "reply_too_large")
            parts.append(part)
        return b"".join(parts)

    async def peek(self, enough: Callable[[bytes], bool] = bool) -> bytes:
        """The first reads until they are ``enough``, or all there is; they stay to be read. EngineError."""
        ahead = self._ahead or b""
        while not enough(ahead):
            with _failures():
                read = await self._response.content.readany()
            if not read:
                break
            ahead += read
        self._ahead = ahead
        return ahead

    async def next_read(self, idle_seconds: float | None = None) -> bytes:
        """The bytes of the next read, as they are; none at the end. TimeoutError, EngineError."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead
        with _failures():
            async with asyncio.timeout(idle_seconds):
                return await self._response.content.readany()

    async def drain(self, seconds: float = 1.0) -> None:
        """Read what is left of a body that has nothing more to say, so that its connection can be used again."""
        if self._response.content.at_eof():
            return
        try:
            with _failures():
                async with asyncio.timeout(seconds):
                    while await self._response.content.readany():
                        pass
        except (TimeoutError, EngineError):
            return  # the connection is closed instead

    async def next_events(self, idle_seconds: float | None = None) -> list[sse.Event] | None:
        """The events that the next reads complete, at least one; None at the end of the stream.

        TimeoutError after ``idle_seconds`` without a read; EngineError if the connection breaks; EventTooLargeError.
        """
        while True:
            read = await self.next_read(idle_seconds)
            if not read:
                return None
            events = self._splitter.feed(read)
            if events:
                return events


class _failures:  # noqa: N801 - reads as a function: ``with _failures():``
    """Turns what aiohttp raises into EngineError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, aiohttp.ClientConnectorError):
            raise EngineError(f"the engine cannot be reached: {error}", 503, "engine_unreachable") from error
        if isinstance(error, aiohttp.ClientError | ConnectionError):
            raise EngineError(f"the engine broke off: {error}", 502, "engine_interrupted") from error


class EngineClient:
    """See the module. Create it inside the running event loop's program; close with ``aclose``."""

    def __init__(
        self,
        *,
        uds: str | None = None,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        event_bytes: int = 64 * 1024 * 1024,
        reply_bytes: int = 256 * 1024 * 1024,
        proxied: bool = False,
        tokenizer: EngineClient | None = None,
    ) -> None:
        """Exactly one of ``uds`` (path of a socket) and ``url`` (scheme, host, port; a path prefix is kept).

        ``proxied``: go through the proxy that the environment names for this host. ``tokenizer``: whom to ask for
        ``tokenizer_info`` instead, where the engine does not tell; it is not closed here.
        """
        if (uds is None) == (url is None):
            raise ValueError("exactly one of uds and url")
        self._uds = uds
        self._base = "http://engine" if url is None else url.rstrip("/").removesuffix("/v1")
        self._own_headers = dict(headers or {})
        self._event_bytes = event_bytes
        self._reply_bytes = reply_bytes
        self._proxy = _proxy(self._base) if proxied else None
        self._session: aiohttp.ClientSession | None = None
        self._tokenizer: dict[str, Any] | None = None
        self._told_by = tokenizer
        self._adapters: dict[str, str] = {}  # name → path, of all that were ever loaded
        self.address = uds if uds is not None else self._base

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # Engines close idle connections, those that we start after minutes, others after 5 s (uvicorn's default):
            # give ours up earlier, so that a request is not sent into a connection that is just being closed.
            connector: aiohttp.BaseConnector
            if self._uds is not None:
                connector = aiohttp.UnixConnector(self._uds, limit=0, keepalive_timeout=3)
            else:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=READ_BYTES,
                max_line_size=_HEADER_BYTES,
                max_field_size=_HEADER_BYTES,
                trust_env=False,  # it would read ~/.netrc, too
                json_serialize=lambda value: orjson.dumps(value).decode(),
            )
        return self._session

    async def aclose(self) -> None:
        """Close all connections; what is in flight fails."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def open(
        self,
        path: str,
        content: bytes,
        headers: Sequence[tuple[str, str]] = (),
        *,
        first_byte_seconds: float | None = None,
        affinity: str | None = None,
    ) -> AsyncIterator[EngineStream]:
        """POST JSON and yield once status and headers are there; leaving early aborts the request at the engine.

        TimeoutError after ``first_byte_seconds``; EngineError (503 cannot be reached, 502 broke off). ``affinity``
        chooses among servers (``replicas``): here is one.
        """
        sent = {name.lower(): value for name, value in headers}
        sent |= {"content-type": "application/json", "accept-encoding": "identity"}
        sent |= {name.lower(): value for name, value in self._own_headers.items()}
        data = content if len(content) <= _AT_ONCE else io.BytesIO(content)  # the latter goes piece by piece
        with _failures():
            async with asyncio.timeout(first_byte_seconds):
                response = await self._open().post(
                    self._base + path, data=data, headers=sent, allow_redirects=False, proxy=self._proxy
                )
        try:
            yield EngineStream(response, event_bytes=self._event_bytes, reply_bytes=self._reply_bytes)
        finally:
            # closes the connection unless the body was read to its end: the engine notices and stops generating
            response.close() if not response.content.at_eof() else response.release()

    async def post(self, path: str, body: Any, headers: Sequence[tuple[str, str]] = ()) -> EngineReply:
        """POST JSON, whole reply."""
        async with self.open(path, orjson.dumps(body), headers) as stream:
            return EngineReply(stream.status, stream.headers, await stream.read())

    async def get(self, path: str) -> EngineReply:
        """GET, whole reply."""
        with _failures():
            async with self._open().get(
                self._base + path, headers=self._own_headers, allow_redirects=False
            ) as response:
                content = await response.read()
                return EngineReply(response.status, [(k.lower(), v) for k, v in response.headers.items()], content)

    async def healthy(self) -> bool:
        """Whether the engine says that it is well; EngineError if it says nothing. The caller sets the deadline."""
        return (await self.get("/health")).status == 200

    async def chat(self, body: Any) -> tuple[int, list[tuple[str, str]], Any]:
        """A chat completion that is not a stream: (status, headers, JSON)."""
        reply = await self.post(CHAT, body)
        return reply.status, reply.headers, reply.json()

    async def completions(self, body: Any) -> tuple[int, list[tuple[str, str]], Any]:
        """A text completion that is not a stream: (status, headers, JSON)."""
        reply = await self.post(COMPLETIONS, body)
        return reply.status, reply.headers, reply.json()

    async def chat_stream(self, body: Any) -> AsyncIterator[bytes]:
        """The data of each event of a streamed chat completion, ``[DONE]`` included. EngineError if refused."""
        async with self.open(CHAT, orjson.dumps(body)) as stream:
            if stream.status != 200:
                raise _refused(EngineReply(stream.status, stream.headers, await stream.read()), CHAT)
            while (events := await stream.next_events()) is not None:
                for event in events:
                    if event.data is not None:
                        yield event.data

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """``POST /tokenize`` with ``messages`` (…) or ``prompt``: {"tokens", "count", "max_model_len", "token_strs"}.

        None if this engine has no such route; EngineError if it refuses (a template that does not take the messages).
        """
        return await self._call("/tokenize", body)

    async def detokenize(self, tokens: Sequence[int], model: str | None = None) -> str | None:
        """Text of token ids; None if this engine has no such route."""
        body: dict[str, Any] = {"tokens": list(tokens)}
        if model is not None:
            body["model"] = model
        reply = await self._call("/detokenize", body)
        return None if reply is None else str(reply["prompt"])

    async def tokenizer_info(self) -> dict[str, Any] | None:
        """Special tokens, ends of turn, chat template; None if this engine does not tell. Asked for once."""
        if self._told_by is not None:
            return await self._told_by.tokenizer_info()
        if self._tokenizer is None:
            reply = await self.get("/tokenizer_info")
            if reply.status in _ABSENT or reply.status == 403:
                return None
            if reply.status != 200:
                raise _refused(reply, "/tokenizer_info")
            self._tokenizer = dict(_object(reply, "/tokenizer_info"))
        return self._tokenizer

    def forget_tokenizer(self) -> None:
        """Ask for ``tokenizer_info`` again next time (the engine was replaced)."""
        self._tokenizer = None
        if self._told_by is not None:
            self._told_by.forget_tokenizer()

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter under a new, immutable name. Never in place; EngineError if refused (400 duplicate).

        A name that was loaded from elsewhere is refused here (409): the engine's prefix cache may know it, and would
        mix what the old weights computed with the new ones.
        """
        first = name not in self._adapters
        known = self._adapters.setdefault(name, path)
        if known != path:
            raise EngineError(
                f"{name} was loaded from {known}, and a name always stands for the same weights: it is not loaded "
                f"from {path}; give these another version",
                409,
                "name_taken",
            )
        reply = await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if reply.status != 200:
            if first:
                del self._adapters[name]  # nothing of it was loaded
            raise _refused(reply, f"loading {name} from {PurePath(path)}")

    async def unload_adapter(self, name: str, *, used: bool = True) -> None:
        """Forget an adapter's name; calls in flight finish. EngineError if it is not there (404).

        ``used=False``: no call was answered with it; the name is free for other weights.
        """
        if not used:
            self._adapters.pop(name, None)
        reply = await self.post("/v1/unload_lora_adapter", {"lora_name": name})
        if reply.status != 200:
            raise _refused(reply, f"unloading {name}")

    async def models(self) -> list[dict[str, Any]]:
        """What the engine serves: [{"id", "root", "parent", "max_model_len", …}]."""
        reply = await self.get("/v1/models")
        if reply.status != 200:
            raise _refused(reply, "/v1/models")
        return list(_object(reply, "/v1/models").get("data") or [])

    async def health(self) -> bool:
        """Whether the engine is ready. Never raises for an engine that is away."""
        try:
            return (await self.get("/health")).status == 200
        except EngineError:
            return False

    async def metrics(self) -> dict[str, Any] | None:
        """Counts of the embedded engine (``/metrics.json``); None if this engine has no such route."""
        reply = await self.get("/metrics.json")
        if reply.status != 200:
            return None
        return dict(_object(reply, "/metrics.json"))

    # one server, as ``engine.Engine`` sees several

    def servers(self) -> Mapping[str, EngineClient]:
        """Itself: it always takes calls."""
        return {self.address: self}

    def take_out(self, server: EngineClient, reason: str) -> None:
        """There is no other one: the caller's error says it."""

    def state(self) -> list[dict[str, Any]]:
        """Nothing: its child process says all."""
        return []

    def figures(self) -> dict[str, int]:
        """Nothing beside the proxy's own."""
        return {}

    async def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        reply = await self.post(path, dict(body))
        if reply.status in _ABSENT and _code(reply) != "model_not_found":
            return None
        if reply.status != 200:
            raise _refused(reply, path)
        return _object(reply, path)


def _proxy(base: str) -> str | None:
    """The proxy that the environment names for an address."""
    parts = urlsplit(base)
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)


def _object(reply: EngineReply, what: str) -> dict[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"the engine's answer to {what} is no JSON object", 502, "malformed_reply")
    return value


def _code(reply: EngineReply) -> str:
    try:
        error = reply.json()["error"]
        return str(error.get("code") or error.get("type") or "error")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "error"


def _refused(reply: EngineReply, what: str) -> EngineError:
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = reply.content[:500].decode(errors="replace")
    return EngineError(f"the engine refused {what}: {message}", reply.status, _code(reply))
