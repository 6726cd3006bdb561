"""Worked examples as training sees them: the ids that the engine's own template gives, the assistant's ones marked.

For each message of the assistant the conversation before it is rendered as a prompt, and once more with the message;
what the second has more, up to the end of the turn, is what a model would have sampled. It refuses to guess: where
the second does not begin with the first, or nothing ends the turn, the example is an error that says which one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from art_backends.errors import EngineError, TemplateError
from art_backends.proxy.control_tokens import sanitize, sanitize_tools
from art_backends.proxy.engine_client import EngineClient
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Trajectory, TrajectoryGroup

RENDER_SECONDS = 120.0


async def group(engine: EngineClient, examples: Sequence[dict[str, Any]]) -> TrajectoryGroup:
    """One trajectory per example (``messages``, and ``tools`` if there are any), one call per assistant message.

    TemplateError if an example cannot be rendered, EngineError if the engine is away.
    """
    info = await engine.tokenizer_info() or {}
    ends = frozenset(int(token) for token in info.get("eos_token_ids") or [])
    special = [str(token) for token in info.get("special_tokens") or []]
    trajectories = []
    for number, example in enumerate(examples):
        name = f"{number:04d}-{hashlib.sha256(json.dumps(example, sort_keys=True).encode()).hexdigest()[:16]}"
        calls = await _calls(engine, _sanitized(example, special), ends, f"example {number + 1} of the batch")
        trajectories.append(Trajectory(rollout_id=name, reward=1.0, calls=calls))
    return TrajectoryGroup(group="examples", trajectories=trajectories)


def _sanitized(example: dict[str, Any], special: Sequence[str]) -> dict[str, Any]:
    """As the proxy does with an agent's requests: what is not the assistant's cannot spell control tokens."""
    messages = example["messages"]
    own = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    return {
        "messages": sanitize(messages, special, own=own)[0],
        "tools": sanitize_tools(example.get("tools"), special)[0],
    }


async def _calls(engine: EngineClient, example: dict[str, Any], ends: frozenset[int], where: str) -> list[Call]:
    messages, tools = example["messages"], example.get("tools")
    calls: list[Call] = []
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        prompt = await _render(engine, messages[:at], tools, where, generate=True)
        whole = await _render(engine, messages[: at + 1], tools, where, generate=False)
        if whole[: len(prompt)] != prompt:
            raise TemplateError(
                f"{where}, message {at + 1}: the chat template renders the conversation before it differently once the "
                "answer follows, so what the model would have said cannot be told"
            )
        said = whole[len(prompt) :]
        last = max((place for place, token in enumerate(said) if token in ends), default=None)
        if last is None:
            raise TemplateError(f"{where}, message {at + 1}: the chat template ends the turn with no token that stops")
        sampled = said[: last + 1]
        calls.append(
            Call(
                id=f"{where}.{at}",
                sequence=len(calls),
                status=CallStatus.OK,
                capture=CaptureLevel.TOKENS,
                prompt_token_ids=prompt,
                choices=[Choice(token_ids=sampled, logprobs=[0.0] * len(sampled))],
            )
        )
    return calls


async def _render(
    engine: EngineClient, messages: Sequence[Any], tools: Any, where: str, *, generate: bool
) -> list[int]:
    body: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": generate}
    if tools:
        body["tools"] = tools
    try:
        async with asyncio.timeout(RENDER_SECONDS):
            reply = await engine.tokenize(body)
    except TimeoutError:
        raise EngineError(f"{where}: not rendered within {RENDER_SECONDS:.0f} s", 504, "engine_timeout") from None
    except EngineError as error:
        if error.status >= 500:
            raise
        raise TemplateError(f"{where}: the chat template refuses it: {error}") from None
    if reply is None:
        raise EngineError("the engine has no /tokenize: it cannot render examples", 501, "no_tokenize")
    return [int(token) for token in reply["tokens"]]
