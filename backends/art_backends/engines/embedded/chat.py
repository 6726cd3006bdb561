"""Chat completions: the shapes of vLLM's replies, whole and streamed.

With ``return_token_ids`` a reply carries ``prompt_token_ids`` and each choice ``token_ids`` (every sampled token,
the end-of-turn token included, also those that a stop string or the tool parser took out of the text).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from art_backends.engines.embedded.answers import Piece, run_rows
from art_backends.engines.embedded.protocol import ChatBody, SamplingBody
from art_backends.engines.embedded.requests import Token
from art_backends.engines.embedded.service import Service
from art_backends.engines.embedded.text import Vocabulary
from art_backends.engines.embedded.tools import ToolCall

FLOOR = -9999.0  # vLLM's stand-in for log 0, which JSON cannot spell


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """The fields with which every reply and every chunk begins."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None,
    }


def token_name(vocabulary: Vocabulary, index: int, body: SamplingBody) -> str:
    return f"token_id:{index}" if body.return_tokens_as_token_ids else vocabulary.piece(index)


class Chat:
    """One chat completion: ``reply`` or ``chunks``, not both."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service = service
        self._body = body

    async def reply(self) -> dict[str, Any]:
        body = self._body
        prompt, rows = await self._prepare()
        choices = [_Collected() for _ in rows]
        async with aclosing(run_rows(self._service.engine, rows)) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        result = head("chat.completion", "chatcmpl", body.model or self._service.base_name)
        result["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        result["usage"] = usage(len(prompt), sum(len(choice.tokens) for choice in choices))
        if body.return_token_ids:
            result["prompt_token_ids"] = prompt
        return result

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The stream's events, without the final [DONE]."""
        body = self._body
        prompt, rows = await self._prepare()
        base = head("chat.completion.chunk", "chatcmpl", body.model or self._service.base_name)
        begun: set[int] = set()
        calls = [0] * len(rows)
        sampled = 0
        async with aclosing(run_rows(self._service.engine, rows)) as pieces:
            async for index, piece in pieces:
                sampled += 1
                if index not in begun:
                    begun.add(index)
                    first: dict[str, Any] = {**base, "choices": [_first_choice(index)]}
                    if body.return_token_ids:
                        first["prompt_token_ids"] = prompt
                    if body.continuous_usage:
                        first["usage"] = usage(len(prompt), 0)
                    yield first
                for choice in self._chunk_choices(index, piece, calls[index]):
                    so_far = {"usage": usage(len(prompt), sampled)} if body.continuous_usage else {}
                    yield {**base, "choices": [choice], **so_far}
                calls[index] += len(piece.calls)
        if body.include_usage:
            yield {**base, "choices": [], "usage": usage(len(prompt), sampled)}

    async def _prepare(self) -> tuple[list[int], list[Any]]:
        body = self._body
        self._service.adapter(body.model)  # an unknown model is told before anything about the prompt
        prompt = self._service.chat_prompt(body)
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        top = (body.top_logprobs or 0) if body.logprobs else 0
        return prompt, await self._service.rows(body, [prompt], wanted=wanted, top_logprobs=top)

    def _choice(self, index: int, choice: _Collected) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [call.as_openai() for call in choice.calls]
        result: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            result["token_ids"] = [token.id for token in choice.tokens]
        return result

    def _chunk_choices(self, index: int, piece: Piece, calls_before: int) -> Iterator[dict[str, Any]]:
        """The first carries the token, the last the end; a token that shows nothing yet has an empty delta."""
        deltas: list[dict[str, Any]] = [{"content": piece.content}] if piece.content else []
        for at, call in enumerate(piece.calls, start=calls_before):
            deltas += _call_deltas(at, call)
        for at, delta in enumerate(deltas or [{}]):
            choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if at == 0:
                choice["logprobs"] = self._logprobs([piece.token])
                if self._body.return_token_ids:
                    choice["token_ids"] = [piece.token.id]
            if piece.finish is not None and at >= len(deltas) - 1:
                choice["finish_reason"] = piece.finish
                choice["stop_reason"] = piece.stop_reason
            yield choice

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = []
        for token in tokens:
            entry = self._logprob(token.id, token.logprob)
            entry["top_logprobs"] = [self._logprob(*top) for top in token.top[: self._body.top_logprobs or 0]]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _logprob(self, index: int, logprob: float) -> dict[str, Any]:
        vocabulary = self._service.vocabulary
        return {
            "token": token_name(vocabulary, index, self._body),
            "logprob": max(logprob, FLOOR),
            "bytes": vocabulary.piece_bytes(index),
        }


class _Collected:
    """A choice of a whole reply, as its pieces come in."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[Token] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.content += piece.content
        self.calls += piece.calls
        self.tokens.append(piece.token)
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason


def _first_choice(index: int) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _call_deltas(index: int, call: ToolCall) -> list[dict[str, Any]]:
    """Two deltas, name first: clients begin a call at its name and append arguments to it."""
    opened = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
    return [
        {"tool_calls": [opened]},
        {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
    ]
