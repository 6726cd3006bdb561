"""What the proxy and the server need of the engine, be it one server (``engine_client``) or several (``replicas``).

It refuses to hold behaviour: this is an interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from art_backends.proxy.engine_client import EngineClient, EngineStream


class Engine(Protocol):
    """See the module. Calls go to any of its servers; adapters are given to each of them."""

    def open(
        self,
        path: str,
        content: bytes,
        headers: Sequence[tuple[str, str]] = (),
        *,
        first_byte_seconds: float | None = None,
        affinity: str | None = None,
    ) -> AbstractAsyncContextManager[EngineStream]:
        """POST JSON; see ``EngineClient.open``. Requests of one ``affinity`` go to the same server where that is well
        and not busier than others: it has computed what they begin with."""
        ...

    async def chat(self, body: Any) -> tuple[int, list[tuple[str, str]], Any]:
        """A chat completion that is not a stream: (status, headers, JSON)."""
        ...

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """``POST /tokenize``; None if there is no such route."""
        ...

    async def detokenize(self, tokens: Sequence[int], model: str | None = None) -> str | None:
        """Text of token ids; None if there is no such route."""
        ...

    async def tokenizer_info(self) -> dict[str, Any] | None:
        """Special tokens, ends of turn, chat template; None if nobody tells."""
        ...

    def forget_tokenizer(self) -> None:
        """Ask for ``tokenizer_info`` again next time."""
        ...

    async def models(self) -> list[dict[str, Any]]:
        """What is served."""
        ...

    async def metrics(self) -> dict[str, Any] | None:
        """The engine's own counts; None if it tells none."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine says that it is well; EngineError if it says nothing. The caller sets the deadline."""
        ...

    def servers(self) -> Mapping[str, EngineClient]:
        """Those that take calls now, by name."""
        ...

    def take_out(self, server: EngineClient, reason: str) -> None:
        """This server did not answer: no call goes there until it is well again, if there are others at all."""
        ...

    def state(self) -> list[dict[str, Any]]:
        """The servers for the status page; empty where there is one and its child process says all."""
        ...

    def figures(self) -> dict[str, int]:
        """Counters and gauges of the servers, for the metrics."""
        ...

    async def aclose(self) -> None:
        """Close all connections; what is in flight fails."""
        ...
