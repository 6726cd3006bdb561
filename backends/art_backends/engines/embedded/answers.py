"""Rows of one request: sampled tokens in, pieces of answers out, as the engine gives them.

``Answer`` turns one row's tokens into text, stop strings and tool calls; ``run_rows`` runs all rows of a request at
once and merges what they say. Leaving ``run_rows`` early cancels its rows in the engine.

It refuses to answer with what the engine broke off: an aborted or failed row raises EngineError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from art_backends.engines.embedded.protocol import SamplingBody
from art_backends.engines.embedded.requests import Generation, Token
from art_backends.engines.embedded.text import Detokenizer, StopMatcher, Vocabulary
from art_backends.engines.embedded.tools import Parser, PlainText, ToolCall
from art_backends.errors import EngineError


class TokenEngine(Protocol):
    """What the HTTP face needs of the core; tokens only."""

    @property
    def max_model_len(self) -> int: ...

    def submit(self, generation: Generation) -> AsyncIterator[Token]: ...


@dataclass(slots=True)
class Piece:
    """What one sampled token adds to an answer. ``finish`` is set on the last piece of a row."""

    token: Token
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None  # stop, length or tool_calls
    stop_reason: str | int | None = None  # the stop string, or the id of a stop token that the request named


class Answer:
    """One row's way from tokens to what the client reads."""

    def __init__(self, vocabulary: Vocabulary, body: SamplingBody, parser: Parser | None = None) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=body.skip_special_tokens)
        self._stops = StopMatcher(body.stops)
        self._stop_token_ids = frozenset(body.stop_token_ids or ())
        self._parser: Parser = parser if parser is not None else PlainText()

    def push(self, token: Token) -> Piece:
        """The piece that this token adds. After a piece with ``finish`` the row is over, whatever the engine says."""
        if token.finish in ("abort", "error"):
            raise EngineError(
                "the engine broke this answer off; ask again",
                status=503 if token.finish == "abort" else 500,
                code=f"engine_{token.finish}",
            )
        piece = Piece(token, finish=token.finish)
        stopped_by_token = token.finish == "stop" and token.id in self._stop_token_ids
        # a stop token that the request named is not part of the text, as in vLLM
        text = self._stops.push(self._detokenizer.flush() if stopped_by_token else self._detokenizer.push(token.id))
        if token.finish is not None and self._stops.hit is None:
            text += self._stops.push(self._detokenizer.flush())
        if self._stops.hit is not None:
            piece.finish, piece.stop_reason = "stop", self._stops.hit
        elif token.finish is not None:
            text += self._stops.flush()
            piece.stop_reason = token.id if stopped_by_token else None
        piece.content, piece.calls = self._parser.push(text)
        if piece.finish is not None:
            content, calls = self._parser.finish()
            piece.content += content
            piece.calls += calls
            if piece.finish == "stop" and self._parser.calls:
                piece.finish = "tool_calls"
        return piece


async def run_rows(
    engine: TokenEngine, rows: Sequence[tuple[Generation, Answer]]
) -> AsyncGenerator[tuple[int, Piece], None]:
    """(row, piece) in the order of arrival until every row has finished. Use it within ``contextlib.aclosing``."""
    queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(maxsize=4 * len(rows))
    tasks = [
        asyncio.create_task(_row(engine, index, generation, answer, queue))
        for index, (generation, answer) in enumerate(rows)
    ]
    left = len(rows)
    try:
        while left:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.finish is not None
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _row(
    engine: TokenEngine, index: int, generation: Generation, answer: Answer, queue: asyncio.Queue[Any]
) -> None:
    try:
        tokens: Any = engine.submit(generation)
        async with aclosing(tokens):
            async for token in tokens:
                piece = answer.push(token)
                await queue.put((index, piece))
                if piece.finish is not None:
                    return
        raise EngineError("the engine ended an answer without saying why", code="engine_error")
    except Exception as error:  # noqa: BLE001 - boundary: whatever a row raises belongs to its request
        await queue.put((index, error))
