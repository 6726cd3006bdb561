"""Whether an engine that was started elsewhere serves the run's base model, in the run's way.

What can be seen from outside: it tokenizes a text as the model's files say, renders a conversation (with tools, where
the template takes them) as the template in force does, and has room for the sequences that the settings allow. A model
with the same tokenizer and template but other weights is found out later: its adapters do not fit, or the trainer
measures how far the sampler is from it (``max_sampler_kl``).

It refuses to guess which of two models was meant: both are named.
"""

from __future__ import annotations

import asyncio
from typing import Any

from art_backends.config import TrainConfig
from art_backends.errors import ConfigError, EngineError
from art_backends.proxy.engine_client import EngineClient

SECONDS = 60.0
TEXT = 'Where is order 4417? «Übermorgen», she said:\n\t{"day": "Monday"}  — 東京 🚂'
CONVERSATION = [
    {"role": "user", "content": "Where is order 4417?"},
    {"role": "assistant", "content": "I do not know."},
    {"role": "user", "content": "Then ask."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "arrival",
        "description": "Day of arrival.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}


async def check(engine: EngineClient, where: str, trainer: EngineClient, config: TrainConfig) -> None:
    """ConfigError if the engine at ``where`` serves something else than what ``trainer`` (the process with the model's
    files) has; EngineError if it cannot be asked."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("a text", {"prompt": TEXT, "add_special_tokens": False}),
        ("a conversation", {"messages": CONVERSATION, "add_generation_prompt": True}),
        ("a conversation with a tool", {"messages": CONVERSATION[:1], "tools": [TOOL], "add_generation_prompt": True}),
    ]
    for what, body in asked:
        ours = await _tokens(trainer, "the trainer", body)
        if ours is None:  # the template takes no tools
            continue
        theirs = await _tokens(engine, where, body)
        if theirs == ours:
            continue
        if "prompt" in body:
            raise ConfigError(
                f"engine_url: {where} turns {what} into other tokens than {config.base_model} does: it serves another "
                "model; start it with this base model, or give the one it serves as base_model"
            )
        raise ConfigError(
            f"engine_url: {where} renders {what} into other tokens than the chat template in force here: start it with "
            "--chat-template and the same file as chat_template, or give none on both sides"
        )
    longest = await _longest(engine, where)
    if longest is not None and longest < config.max_model_len:
        wanted = await _longest_of_trainer(trainer, config)
        if longest < wanted:
            raise ConfigError(
                f"max_model_len: {where} serves sequences of {longest} tokens, {wanted} are asked for: start it with "
                f"--max-model-len {wanted}, or set max_model_len to {longest}"
            )


async def _tokens(engine: EngineClient, where: str, body: dict[str, Any]) -> list[int] | None:
    """Token ids, None where the template refuses the messages."""
    try:
        async with asyncio.timeout(SECONDS):
            reply = await engine.tokenize(body)
    except TimeoutError:
        raise EngineError(f"{where} did not answer /tokenize within {SECONDS:.0f} s", 504, "engine_timeout") from None
    except EngineError as error:
        if error.status in (400, 422):
            return None
        raise
    if reply is None:
        raise ConfigError(f"engine_url: {where} has no /tokenize: it is no vLLM server, or only a gateway to one")
    return [int(token) for token in reply["tokens"]]


async def _longest(engine: EngineClient, where: str) -> int | None:
    try:
        async with asyncio.timeout(SECONDS):
            models = await engine.models()
    except TimeoutError:
        raise EngineError(f"{where} did not answer /v1/models within {SECONDS:.0f} s", 504, "engine_timeout") from None
    lengths = [model["max_model_len"] for model in models if isinstance(model.get("max_model_len"), int)]
    return min(lengths, default=None)


async def _longest_of_trainer(trainer: EngineClient, config: TrainConfig) -> int:
    info = await trainer.tokenizer_info() or {}
    found = info.get("model_max_length")
    return min(config.max_model_len, found) if isinstance(found, int) else config.max_model_len
