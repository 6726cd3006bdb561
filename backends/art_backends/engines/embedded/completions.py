"""Text completions (``/v1/completions``): prompts as text or token ids, one or many, whole and streamed.

Choices are numbered prompt by prompt: choice ``p * n + i`` is the i-th answer to prompt p. With
``return_token_ids`` each choice carries its ``prompt_token_ids`` and ``token_ids``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from art_backends.engines.embedded.answers import Piece, run_rows
from art_backends.engines.embedded.chat import FLOOR, head, token_name, usage
from art_backends.engines.embedded.protocol import ApiError, CompletionBody
from art_backends.engines.embedded.requests import Token
from art_backends.engines.embedded.service import Service


class Completion:
    """One completion request: ``reply`` or ``chunks``, not both."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self._service = service
        self._body = body

    async def reply(self) -> dict[str, Any]:
        body = self._body
        prompts, rows = await self._prepare()
        collected: list[list[Piece]] = [[] for _ in rows]
        async with aclosing(run_rows(self._service.engine, rows)) as pieces:
            async for index, piece in pieces:
                collected[index].append(piece)
        result = head("text_completion", "cmpl", body.model or self._service.base_name)
        result["choices"] = []
        for index, row in enumerate(collected):
            choice = self._choice(index, row, offset=0)
            if body.return_token_ids:
                choice["prompt_token_ids"] = prompts[index // body.choices]
            result["choices"].append(choice)
        result["usage"] = usage(sum(map(len, prompts)), sum(map(len, collected)))
        return result

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The stream's events, without the final [DONE]."""
        body = self._body
        prompts, rows = await self._prepare()
        base = head("text_completion", "cmpl", body.model or self._service.base_name)
        offsets: dict[int, int] = {}
        sampled = 0
        async with aclosing(run_rows(self._service.engine, rows)) as pieces:
            async for index, piece in pieces:
                sampled += 1
                choice = self._choice(index, [piece], offset=offsets.get(index, 0))
                if body.return_token_ids and index not in offsets:
                    choice["prompt_token_ids"] = prompts[index // body.choices]
                offsets[index] = offsets.get(index, 0) + len(piece.content)
                yield {**base, "choices": [choice]}
        if body.include_usage:
            yield {**base, "choices": [], "usage": usage(sum(map(len, prompts)), sampled)}

    async def _prepare(self) -> tuple[list[list[int]], list[Any]]:
        body = self._body
        self._service.adapter(body.model)
        prompts = self._prompts()
        rows = await self._service.rows(body, prompts, wanted=body.max_tokens, top_logprobs=body.logprobs or 0)
        return prompts, rows

    def _prompts(self) -> list[list[int]]:
        prompt = self._body.prompt
        if not prompt:
            raise ApiError("prompt is empty", param="prompt")
        given: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
        found = []
        for item in given:
            ids = item
            if isinstance(item, str):
                ids = self._service.vocabulary.encode(item, add_special_tokens=self._body.add_special_tokens)
            found.append(self._service.check_ids(ids, "prompt"))
        return found

    def _choice(self, index: int, pieces: list[Piece], *, offset: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(piece.content for piece in pieces),
            "logprobs": self._logprobs(pieces, offset),
            "finish_reason": pieces[-1].finish,
            "stop_reason": pieces[-1].stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [piece.token.id for piece in pieces]
        return choice

    def _logprobs(self, pieces: list[Piece], offset: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.content)
        return {
            "tokens": [self._name(piece.token.id) for piece in pieces],
            "token_logprobs": [max(piece.token.logprob, FLOOR) for piece in pieces],
            "top_logprobs": [self._top(piece.token) for piece in pieces],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        """The sampled token and the likeliest ones, as OpenAI does."""
        listed = [(token.id, token.logprob), *token.top[: self._body.logprobs or 0]]
        return {self._name(index): max(logprob, FLOOR) for index, logprob in listed}

    def _name(self, index: int) -> str:
        return token_name(self._service.vocabulary, index, self._body)
