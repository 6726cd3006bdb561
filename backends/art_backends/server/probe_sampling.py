"""Asks the engine what it samples with where a request says nothing: some apply the model's ``generation_config.json``.

Nobody tells these defaults. So a call that says nothing is compared with one that says the neutral values; where they
differ, the model's file is read and compared in the same way. The proxy then says them in every recorded call, which
makes the record true whatever the engine does.

It refuses to guess: defaults that cannot be found out are replaced by the neutral ones, and that is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path
from typing import Any

from art_backends.errors import EngineError
from art_backends.proxy.engine import Engine
from art_backends.server.probe import PROBE_SECONDS, SILENT

log = logging.getLogger(__name__)

_FILE = "generation_config.json"
_TOP, _TOKENS = 5, 8  # several tokens: a penalty for repetition shows late
_TOLERANCE = 1e-2  # nats: the same call twice differs by less, a temperature of 0.9 by more
_MESSAGES = [{"role": "user", "content": "Write red, blue, red, blue, and go on."}]

Said = list[dict[str, float]]  # at each place of an answer the likeliest tokens and their log-probabilities


async def defaults(engine: Engine, model: str) -> dict[str, float]:
    """The engine's own values of sampling parameters, by name; empty where a silent call is the neutral one.

    EngineError if the engine is away.
    """
    said, neutral = await _likeliest(engine, model, {}), await _likeliest(engine, model, SILENT)
    if said is None or neutral is None or _same(said, neutral):
        return {}
    found = await asyncio.to_thread(_read, await _root(engine, model))
    if found is not None and _same(said, await _likeliest(engine, model, SILENT | found)):
        log.info("calls that say nothing are sampled with the model's own settings: %s", found)
        return SILENT | found
    log.warning(
        "the engine samples with defaults of its own, which it does not tell: calls that say nothing get the neutral "
        "ones instead; start vLLM with --generation-config vllm"
    )
    return dict(SILENT)


async def _likeliest(engine: Engine, model: str, sampling: dict[str, float]) -> Said | None:
    """What might have been drawn, from one seed; None if the engine does not tell."""
    body: dict[str, Any] = {"model": model, "messages": _MESSAGES, "max_tokens": _TOKENS, "seed": 7}
    body |= {"logprobs": True, "top_logprobs": _TOP, **sampling}
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            status, _, reply = await engine.chat(body)
        places = reply["choices"][0]["logprobs"]["content"] if status == 200 else []
        return [
            {str(entry["token"]): float(entry["logprob"]) for entry in place["top_logprobs"][:_TOP]} for place in places
        ] or None
    except TimeoutError:
        raise EngineError(f"the engine gave no answer within {PROBE_SECONDS:.0f} s", 504, "engine_timeout") from None
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _same(one: Said, other: Said | None) -> bool:
    """Whether the same was as likely at each place; a token that only one of them may sample is a difference."""
    return (
        other is not None
        and len(one) == len(other)
        and all(
            _close(mine.get(token, -math.inf), theirs.get(token, -math.inf))
            for mine, theirs in zip(one, other, strict=True)
            for token in _first(mine) | _first(theirs)
        )
    )


def _first(found: dict[str, float]) -> set[str]:
    """All but the last one, which changes places with its equals."""
    return set(sorted(found, key=lambda token: -found[token])[: _TOP - 2])


def _close(one: float, other: float) -> bool:
    impossible = -1000.0  # a token that is cut off; JSON has no infinity
    return abs(one - other) < _TOLERANCE or max(one, other) < impossible


async def _root(engine: Engine, model: str) -> str:
    async with asyncio.timeout(PROBE_SECONDS):
        models = await engine.models()
    return next((str(item.get("root") or "") for item in models if item.get("id") == model), "")


def _read(root: str) -> dict[str, float] | None:
    """The sampling parameters of a model's folder; None where it is not on this machine or says none."""
    try:
        settings: Any = json.loads((Path(root) / _FILE).read_bytes())
    except (OSError, ValueError):
        return None
    if not root or not isinstance(settings, dict):
        return None
    named = {name: settings.get(name) for name in SILENT}
    found = {name: value for name, value in named.items() if isinstance(value, int | float) and value is not True}
    return found or None
