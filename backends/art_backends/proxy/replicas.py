"""One or more engine servers behind the interface of one (``engine.Engine``).

A call goes to the server with the fewest calls in flight; those of a rollout go where its last one went, whose prefix
cache knows how they begin, unless that server is out or has SLACK more in flight than another.

A server is out as soon as it cannot be reached, breaks off before the first byte of an answer's body (of a stream:
before the first token), or does not say in time that it is well. What was asked of it and has had none goes elsewhere,
once to each server; what has had one fails as it would with one server. Whoever is out is asked for its health until
it is well, is given the adapters (``on_back``), and takes calls again.

A status is an answer, not a failure, with three exceptions. 503, while another server is up: it says that nothing was
done and that another try may be lucky; the next server is that try. Another status of 500 or more, or a stream that
begins with an error, from a server that then is not well: an engine that dies answers so, having said nothing. 404 from
a server that does not list the model: it was restarted unseen, and has to be given its adapters.

It refuses to send a call twice to one server, or elsewhere once any of an answer has come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import orjson

from art_backends.errors import ArtError, ConfigError, EngineError
from art_backends.proxy.engine_client import EngineClient, EngineStream

log = logging.getLogger(__name__)

SLACK = 4  # a rollout leaves its server where that has so many more calls in flight than another
ROLLOUTS = 10_000  # whose server is remembered
UP_SECONDS = 10.0  # between two looks at a server that is up
OUT_SECONDS = 2.0  # and at one that is out
HEALTH_SECONDS = 10.0  # until a look is given up
BACK_SECONDS = 900.0  # until a server must have been given the adapters
_FAILED = frozenset({"engine_unreachable", "engine_interrupted"})
_ERROR_EVENTS = (b'data: {"error"', b'data:{"error"')

T = TypeVar("T")


def _begun(content: bytes) -> bool:
    """Whether the beginning of a stream may hold a token: an event, and not the one alone that names the role."""
    events = content.count(b"\n\n") + content.count(b"\r\n\r\n")
    return events > 1 or (events == 1 and b'"role"' not in content)


class _ElsewhereError(Exception):
    """This server does not do it; another one may."""


class _Replica:
    """One server and what is known of it."""

    def __init__(self, name: str, client: EngineClient) -> None:
        self.name = name
        self.client = client
        self.up = True
        self.coming_back = False
        self.since = time.time()
        self.why: str | None = None  # it is out
        self.in_flight = 0
        self.calls = 0  # it was asked
        self.moved = 0  # calls that went elsewhere
        self.unanswered: set[asyncio.Timeout] = set()  # of requests without an answer; expired when it goes out
        self.look = asyncio.Event()  # look at its health now

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def state(self) -> dict[str, Any]:
        state = "up" if self.up else "coming back" if self.coming_back else "out"
        return {
            "name": self.name,
            "state": state,
            "since": self.since,
            "why": self.why,
            "in_flight": self.in_flight,
            "calls": self.calls,
            "moved": self.moved,
        }


Work = Callable[[_Replica, "list[_Replica]"], Awaitable[T]]


class Replicas:
    """See the module. All are taken to be up, with their adapters, when it is made. Lives in one event loop."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        names: Sequence[str] | None = None,
        up_seconds: float = UP_SECONDS,
        out_seconds: float = OUT_SECONDS,
        health_seconds: float = HEALTH_SECONDS,
    ) -> None:
        """``names``: what to call them, else their addresses. ConfigError if two have one name, or there is
        none."""
        given = [client.address for client in clients] if names is None else list(names)
        twice = {name for name in given if given.count(name) > 1}
        if twice:
            raise ConfigError(f"engine_url: {', '.join(sorted(twice))} is given twice")
        if not given or len(given) != len(clients):
            raise ConfigError(f"engine_url: {len(clients)} servers have {len(given)} names")
        self.on_back: Callable[[EngineClient], Awaitable[None]] | None = None  # gives a server its adapters
        self._replicas = [_Replica(name, client) for name, client in zip(given, clients, strict=True)]
        self._up_seconds = up_seconds
        self._out_seconds = out_seconds
        self._health_seconds = health_seconds
        self._homes: OrderedDict[str, _Replica] = OrderedDict()  # by affinity; the one used last is last
        self._changed = asyncio.Condition()
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to look at the servers' health."""
        self._watching = [
            asyncio.create_task(self._watch(replica), name=f"watch {replica.name}") for replica in self._replicas
        ]

    async def aclose(self) -> None:
        """Stop looking, close all connections; what is in flight fails."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for replica in self._replicas:
            await replica.client.aclose()

    # what the server asks

    @property
    def up(self) -> bool:
        """Whether any server takes calls."""
        return any(replica.up for replica in self._replicas)

    async def wait_ready(self, deadline: float) -> None:
        """Wait until a server takes calls; EngineError if none does within ``deadline`` seconds."""
        try:
            async with asyncio.timeout(deadline), self._changed:
                await self._changed.wait_for(lambda: self.up)
        except TimeoutError:
            raise self._none_left() from None

    def servers(self) -> Mapping[str, EngineClient]:
        """Those that take calls now, by name."""
        return {replica.name: replica.client for replica in self._replicas if replica.up}

    def take_out(self, server: EngineClient, reason: str) -> None:
        """This server did not answer somebody: no call goes there until it is well, and has the adapters."""
        for replica in self._replicas:
            if replica.client is server:
                self._out(replica, reason)

    def state(self) -> list[dict[str, Any]]:
        """Each server's name, state (up, out, coming back), since when, why it is out, calls in flight and moved."""
        return [replica.state() for replica in self._replicas]

    def figures(self) -> dict[str, int]:
        """How many servers are up, and how many calls they could not take went elsewhere."""
        return {
            "replicas_up": sum(replica.up for replica in self._replicas),
            "moved": sum(replica.moved for replica in self._replicas),
        }

    # what a server is asked

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
        """POST JSON and yield once the answer's first byte is there, a stream's first token (else: the headers).

        TimeoutError after ``first_byte_seconds``, all servers together; EngineError 503 if none is left.
        """

        async def work(replica: _Replica, tried: list[_Replica]) -> tuple[EngineStream, AsyncExitStack]:
            async with AsyncExitStack() as stack:
                stack.enter_context(replica.busy())
                replica.calls += 1
                stream = await stack.enter_async_context(replica.client.open(path, content, headers))
                first = await stream.peek(_begun if stream.is_events else bool) if stream.status == 200 else b""
                if stream.status == 200 and stream.is_events and not _begun(first):
                    raise EngineError("the engine's stream ended before its first token", 502, "engine_interrupted")
                if stream.status == 404:
                    await self._accept_unknown(replica, content)
                if stream.status >= 500 or first.startswith(_ERROR_EVENTS):
                    await self._accept_failure(replica, stream.status, tried)
                return stream, stack.pop_all()

        async with asyncio.timeout(first_byte_seconds):
            (stream, stack), tried = await self._anywhere(work, affinity)
        for lost in tried[:-1]:
            lost.moved += 1
        async with stack:
            yield stream

    async def _accept_failure(self, replica: _Replica, status: int, tried: list[_Replica]) -> None:
        """_ElsewhereError if an answer of 500 or more is not to be the call's; see the module."""
        if self._choose(None, tried) is None:
            return
        if status == 503:
            raise _ElsewhereError
        why = await self._unwell(replica)
        if why is not None:
            self._out(replica, f"it answered with an error and is not well: {why}")
            raise _ElsewhereError

    async def _accept_unknown(self, replica: _Replica, content: bytes) -> None:
        """_ElsewhereError if a server does not know the model any more."""
        model = orjson.loads(content).get("model")
        try:
            async with asyncio.timeout(self._health_seconds):
                if model in [item.get("id") for item in await replica.client.models()]:
                    return
        except TimeoutError:
            pass  # nor is it well
        self._out(replica, f"it does not serve {model} any more: it was restarted, or somebody unloaded it")
        raise _ElsewhereError

    async def chat(self, body: Any) -> tuple[int, list[tuple[str, str]], Any]:
        """A chat completion that is not a stream: (status, headers, JSON)."""
        return await self._ask(lambda client: client.chat(body))

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """``POST /tokenize``; None if there is no such route."""
        return await self._ask(lambda client: client.tokenize(body))

    async def detokenize(self, tokens: Sequence[int], model: str | None = None) -> str | None:
        """Text of token ids; None if there is no such route."""
        return await self._ask(lambda client: client.detokenize(tokens, model))

    async def tokenizer_info(self) -> dict[str, Any] | None:
        """Special tokens, ends of turn, chat template; None if nobody tells."""
        return await self._ask(lambda client: client.tokenizer_info())

    def forget_tokenizer(self) -> None:
        """Ask for ``tokenizer_info`` again next time."""
        for replica in self._replicas:
            replica.client.forget_tokenizer()

    async def models(self) -> list[dict[str, Any]]:
        """What the servers serve: all the same."""
        return await self._ask(lambda client: client.models())

    async def metrics(self) -> dict[str, Any] | None:
        """The counts of all servers that are up and tell them, added; None if none does."""
        told = [counts for client in self.servers().values() if (counts := await client.metrics()) is not None]
        if len(told) < 2:
            return told[0] if told else None
        names = {name for counts in told for name, value in counts.items() if isinstance(value, int | float)}
        return {name: sum(counts.get(name) or 0 for counts in told) for name in sorted(names)}

    async def healthy(self) -> bool:
        """Whether any server takes calls, as far as is known."""
        return self.up

    # choosing, failing, coming back

    async def _ask(self, ask: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Ask any server; the next one if it fails."""

        async def work(replica: _Replica, _: list[_Replica]) -> T:
            with replica.busy():
                return await ask(replica.client)

        answer, _ = await self._anywhere(work, None)
        return answer

    async def _anywhere(self, work: Work[T], affinity: str | None) -> tuple[T, list[_Replica]]:
        """What ``work`` makes with the first server that does not fail, and all that were tried. EngineError."""
        tried: list[_Replica] = []
        while (replica := self._choose(affinity, tried)) is not None:
            tried.append(replica)
            self._remember(affinity, replica)
            try:
                async with asyncio.timeout(None) as patience:
                    replica.unanswered.add(patience)
                    try:
                        return await work(replica, tried), tried
                    finally:
                        replica.unanswered.discard(patience)
            except TimeoutError:
                if not patience.expired():  # not because the server went out: not ours
                    raise
            except _ElsewhereError:
                pass
            except EngineError as error:
                if error.code not in _FAILED:
                    raise
                self._out(replica, str(error))
        raise self._none_left()

    def _choose(self, affinity: str | None, tried: Sequence[_Replica]) -> _Replica | None:
        free = [replica for replica in self._replicas if replica.up and replica not in tried]
        if not free:
            return None
        least = min(free, key=lambda replica: (replica.in_flight, replica.calls))
        home = None if affinity is None else self._homes.get(affinity)
        if home is not None and home in free and home.in_flight - least.in_flight < SLACK:
            return home
        return least

    def _remember(self, affinity: str | None, replica: _Replica) -> None:
        if affinity is None or len(self._replicas) == 1:
            return
        self._homes[affinity] = replica
        self._homes.move_to_end(affinity)
        if len(self._homes) > ROLLOUTS:
            self._homes.popitem(last=False)

    def _none_left(self) -> EngineError:
        whys = "; ".join(f"{replica.name}: {replica.why}" for replica in self._replicas if replica.why is not None)
        return EngineError(f"no engine server takes calls ({whys or 'all refused'})", 503, "engine_unreachable")

    def _out(self, replica: _Replica, why: str) -> None:
        if not replica.up:
            return
        replica.up, replica.why, replica.since = False, why, time.time()
        log.error("%s is out, with %d calls in flight: %s", replica.name, replica.in_flight, why)
        now = asyncio.get_running_loop().time()
        for patience in replica.unanswered:
            if not patience.expired():
                patience.reschedule(now)  # its request goes elsewhere
        replica.unanswered.clear()
        replica.look.set()  # it may be back already: a connection broke, no more

    async def _unwell(self, replica: _Replica) -> str | None:
        """Why a server is not well, or None if it is."""
        try:
            async with asyncio.timeout(self._health_seconds):
                return None if await replica.client.healthy() else "its /health says that it is not well"
        except TimeoutError:
            return f"its /health gave no answer within {self._health_seconds:g} s"
        except EngineError as error:
            return str(error)

    async def _watch(self, replica: _Replica) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._up_seconds if replica.up else self._out_seconds):
                    await replica.look.wait()
            replica.look.clear()
            why = await self._unwell(replica)
            if why is None:
                await self._bring_back(replica)
            elif replica.up:
                self._out(replica, why)
            else:
                replica.why = why

    async def _bring_back(self, replica: _Replica) -> None:
        if replica.up:
            return
        replica.coming_back = True
        replica.client.forget_tokenizer()
        try:
            if self.on_back is not None:
                async with asyncio.timeout(BACK_SECONDS):
                    await self.on_back(replica.client)
        except Exception as error:  # boundary: whatever was met with this server, it is watched on
            replica.why = f"it is well again, but could not be given the adapters: {error or type(error).__name__}"
            log.warning("%s stays out: %s", replica.name, replica.why, exc_info=not isinstance(error, ArtError))
            return
        finally:
            replica.coming_back = False
        # no await since on_back gave the adapters: whoever loads the next one finds this server up
        replica.up, replica.why, replica.since = True, None, time.time()
        log.info("%s is back", replica.name)
        async with self._changed:
            self._changed.notify_all()
