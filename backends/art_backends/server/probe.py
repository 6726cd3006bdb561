"""Asks the engine what it really does: how much of a call it gives back, and whether an adapter answers.

The capture level is stamped on the policy: only an engine that gives token ids and logprobs trains. It refuses to
believe a status code: an adapter is in order when it sampled a token of finite probability.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from art_backends.errors import AdapterError, EngineError
from art_backends.proxy.engine_client import EngineClient
from art_backends.trajectories import CaptureLevel

PROBE_SECONDS = 120.0
_MESSAGES = [{"role": "user", "content": "Hello"}]


async def base_id(engine: EngineClient) -> str:
    """The name under which the engine serves the base model (the one without a parent)."""
    async with asyncio.timeout(PROBE_SECONDS):
        models = await engine.models()
    for model in models:
        if not model.get("parent"):
            return str(model["id"])
    raise EngineError("the engine serves no base model (/v1/models names none without a parent)", 502, "no_base_model")


async def capture_level(engine: EngineClient, model: str) -> tuple[CaptureLevel, bool]:
    """What comes back of a call, and whether exact prompts are taken. EngineError if it answers no chat at all."""
    status, reply = await _sample(engine, model)
    if status != 200:
        plain_status, plain = await _chat(engine, {"model": model, "messages": _MESSAGES, "max_tokens": 1})
        if plain_status != 200:
            raise EngineError(
                f"the engine answers no chat completion: {_message(plain)}", plain_status, "engine_unusable"
            )
        return CaptureLevel.TEXT, False
    prompt, tokens, logprobs = _ids(reply)
    if not prompt or not tokens:
        return CaptureLevel.TEXT, False
    if len(logprobs) != len(tokens):
        return CaptureLevel.IDS, False
    longer = [*prompt, *tokens]
    status, reply = await _sample(engine, model, {"kv_transfer_params": {"prompt_token_ids": longer}})
    return CaptureLevel.TOKENS, status == 200 and _ids(reply)[0] == longer


async def adapter_answers(engine: EngineClient, model: str) -> None:
    """AdapterError if the adapter does not sample a token with a finite logprob; EngineError if the engine is away."""
    status, reply = await _sample(engine, model)
    if status >= 500:
        raise EngineError(f"the engine failed while {model} was tried: {_message(reply)}", status, "engine_error")
    if status != 200:
        raise AdapterError(f"{model} was loaded but does not answer: {_message(reply)}")
    _, tokens, logprobs = _ids(reply)
    if tokens and not all(math.isfinite(value) for value in logprobs):
        raise AdapterError(f"{model} answers with logprobs that are not finite: its weights are broken")


async def _sample(engine: EngineClient, model: str, more: dict[str, Any] | None = None) -> tuple[int, Any]:
    body = {
        "model": model,
        "messages": _MESSAGES,
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        **(more or {}),
    }
    return await _chat(engine, body)


async def _chat(engine: EngineClient, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            status, _, reply = await engine.chat(body)
    except TimeoutError:
        raise EngineError(f"the engine gave no answer within {PROBE_SECONDS:.0f} s", 504, "engine_timeout") from None
    except ValueError as error:
        raise EngineError(f"the engine's answer is no JSON: {error}", 502, "malformed_reply") from None
    return status, reply


def _ids(reply: Any) -> tuple[list[int], list[int], list[float]]:
    try:
        choice = reply["choices"][0]
        logprobs = [float(item["logprob"]) for item in (choice.get("logprobs") or {}).get("content") or []]
        return list(reply.get("prompt_token_ids") or []), list(choice.get("token_ids") or []), logprobs
    except (KeyError, IndexError, TypeError, ValueError):
        return [], [], []


def _message(reply: Any) -> str:
    try:
        return str(reply["error"]["message"])
    except (KeyError, TypeError):
        return str(reply)[:500]
