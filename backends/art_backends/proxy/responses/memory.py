"""What was said in the responses that a later request may name: in memory, bounded, each owner's alone.

It refuses to be a store: a restarted server knows no earlier response. Clients that must not depend on that send the
items themselves.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: str
    response: dict[str, Any]
    messages: list[Message]  # the whole conversation, instructions left out, the answer included
    size: int
    until: float


class Memory:
    """``responses`` at most, ``size`` bytes at most, ``seconds`` long; the oldest go first."""

    LIMITS = "this server keeps the newest ones in memory, for an hour, until it stops"

    def __init__(
        self,
        *,
        responses: int = 10_000,
        size: int = 256 * 1024 * 1024,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._responses = responses
        self._limit = size
        self._seconds = seconds
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._items: dict[tuple[str, str], dict[str, Any]] = {}  # by owner and id
        self._owned: dict[str, set[str]] = {}
        self._size = 0

    def keeper(self, owner: str, messages: Sequence[Message]) -> Callable[[dict[str, Any], Message], None]:
        """What keeps a response and its answer behind these messages."""

        def keep(response: dict[str, Any], answer: Message) -> None:
            whole = [*messages, answer]
            size = len(orjson.dumps([response, whole]))
            self._kept[response["id"]] = _Kept(owner, response, whole, size, self._clock() + self._seconds)
            self._items |= {(owner, item["id"]): item for item in response["output"]}
            self._owned.setdefault(owner, set()).add(response["id"])
            self._size += size
            self._tidy()

        return keep

    def response(self, owner: str, name: str) -> dict[str, Any] | None:
        """The response, or None if it is not known to this owner."""
        kept = self._find(owner, name)
        return None if kept is None else kept.response

    def messages(self, owner: str, name: str) -> list[Message] | None:
        """The conversation up to and with a response, as chat messages; None if it is not known to this owner."""
        kept = self._find(owner, name)
        return None if kept is None else kept.messages

    def item(self, owner: str, name: str) -> dict[str, Any] | None:
        """An item of a response's output, by its id."""
        self._tidy()
        return self._items.get((owner, name))

    def forget(self, owner: str, name: str) -> bool:
        """Whether there was such a response of this owner; it is gone now."""
        if self._find(owner, name) is None:
            return False
        self._drop(name)
        return True

    def forget_all(self, owner: str) -> None:
        """The owner is gone: so are its responses."""
        for name in list(self._owned.get(owner, ())):
            self._drop(name)

    def _find(self, owner: str, name: str) -> _Kept | None:
        self._tidy()
        kept = self._kept.get(name)
        return kept if kept is not None and kept.owner == owner else None

    def _tidy(self) -> None:
        now = self._clock()
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if len(self._kept) <= self._responses and self._size <= self._limit and oldest.until > now:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name)
        self._size -= kept.size
        for item in kept.response["output"]:
            self._items.pop((kept.owner, item["id"]), None)
        names = self._owned[kept.owner]
        names.discard(name)
        if not names:
            del self._owned[kept.owner]
