"""The proxy's doors: which paths it answers, each with its dialect. What is not here is 404, whoever asks.

A door is found by the path alone. It refuses to know who may come in: that is the server's guard.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from art_backends.proxy.dialect import Dialect
from art_backends.proxy.identity import Identity

Answer = Callable[[Request, Identity], Awaitable[Response]]


class Counting(Dialect, Protocol):
    """A dialect whose clients ask how many tokens a request has."""

    def counted(self, tokens: int) -> bytes: ...


@dataclass(frozen=True)
class Door:
    """``path`` is as Starlette writes them."""

    method: str
    path: str
    answer: Answer
    dialect: Dialect


class Doors:
    """All doors of a proxy."""

    def __init__(self, doors: Iterable[Door]) -> None:
        self.all = list(doors)
        self._patterns: list[tuple[re.Pattern[str], Door]] = [(compile_path(door.path)[0], door) for door in self.all]

    def dialect(self, path: str) -> Dialect | None:
        """The dialect that is spoken at a path; None where there is no door."""
        for pattern, door in self._patterns:
            if pattern.match(path):
                return door.dialect
        return None
