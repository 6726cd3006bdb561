"""A row being sampled, and the way its tokens go back to the event loop that waits for them.

It refuses to decide anything: the engine's thread owns every field except ``cancelled``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from art_backends.engines.embedded.drafts import Trail
from art_backends.engines.embedded.requests import Generation, Token
from art_backends.engines.embedded.sampling import Draws, Settings
from art_backends.engines.embedded.tree import Place
from art_backends.engines.embedded.weights import Version
from art_backends.errors import EngineError


class Row:
    """One generation on its way. ``ids`` is prompt and sampled tokens; ``place`` is set once it was admitted."""

    def __init__(self, generation: Generation, version: Version, seed: int) -> None:
        self.generation = generation
        self.version = version
        self.ids = list(generation.prompt_ids)
        self.trail = Trail(self.ids)
        self.place: Place | None = None
        self.sampled = 0
        self.cancelled = False  # set by the consumer, from its own thread
        self.done = False
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Token | EngineError] = asyncio.Queue()
        self.settings = Settings(
            Draws(random.Random(seed)),  # noqa: S311
            generation.temperature,
            generation.top_p,
            generation.top_k,
            generation.top_logprobs,
            generation.mask,
        )


def deliver(items: Iterable[tuple[Row, Token | EngineError]]) -> None:
    """Hand results to their event loops: one wake-up per loop. A loop that is closed has nobody waiting."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Row, Token | EngineError]]] = {}
    for row, item in items:
        by_loop.setdefault(row.loop, []).append((row, item))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, batch)
        except RuntimeError:  # the loop was closed
            for row, _ in batch:
                row.cancelled = True


def _put(batch: list[tuple[Row, Token | EngineError]]) -> None:
    for row, item in batch:
        row.queue.put_nowait(item)
