"""Worked examples as training sees them: the ids that the engine's own template gives, the assistant's ones marked.

For each message of the assistant the conversation before it is rendered as a prompt, and once more with the message;
what the second has more, up to the token that ends the turn, is what a model would have sampled. Everything that is
not the assistant's is sanitised as in an agent's requests.

It refuses to guess: where the second rendering does not begin with the first, or nothing ends the turn, the example is
an error that says which one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from art_backends.errors import TemplateError
from art_backends.proxy.control_tokens import sanitize, sanitize_tools
from art_backends.proxy.tail import Message, Renderer, Vocabulary
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Trajectory, TrajectoryGroup

_NEXT: Message = {"role": "user", "content": "Hello"}


async def to_group(
    renderer: Renderer,
    vocabulary: Vocabulary,
    examples: Sequence[Mapping[str, Any]],
    *,
    longest: int | None = None,
) -> TrajectoryGroup:
    """One trajectory per example (``messages``, and ``tools`` if there are any), one call per assistant message.

    TemplateError if the template does not take an example, or it has more than ``longest`` tokens; EngineError if the
    engine is away.
    """
    trajectories = []
    for number, example in enumerate(examples):
        content = json.dumps(example, sort_keys=True)
        name = f"{number:04d}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        try:
            calls = await to_calls(renderer, vocabulary, example)
            tokens = max(len(call.prompt_token_ids) + len(call.choices[0].token_ids) for call in calls)
            if longest is not None and tokens > longest:
                raise TemplateError(f"it has {tokens} tokens, the model takes {longest} here (max_model_len)")
        except TemplateError as error:
            raise TemplateError(f"example {content[:200]}: {error}") from None
        trajectories.append(Trajectory(rollout_id=name, reward=1.0, calls=calls))
    return TrajectoryGroup(group="examples", trajectories=trajectories)


async def to_calls(renderer: Renderer, vocabulary: Vocabulary, example: Mapping[str, Any]) -> list[Call]:
    """The calls that would have given the assistant's messages, but for those with a ``weight`` of 0 (as in OpenAI's
    format: context, not to be learned). Their logprobs are 0, which nothing reads."""
    learned = [message.get("weight", 1) != 0 for message in example["messages"]]
    given = [{key: value for key, value in message.items() if key != "weight"} for message in example["messages"]]
    own = [at for at, message in enumerate(given) if message.get("role") == "assistant"]
    messages, _ = sanitize(given, vocabulary.special_tokens, own=own)
    tools, _ = sanitize_tools(example.get("tools"), vocabulary.special_tokens)
    calls: list[Call] = []
    for at in (place for place in own if learned[place]):
        prompt = await renderer.tokenize(messages[:at], tools)
        try:
            sampled = _said(prompt, await _with(renderer, messages[: at + 1], tools), vocabulary)
            if sampled is None:  # some templates end a turn by beginning the next
                after = messages[at + 1 : at + 2] or [_NEXT]
                sampled = _said(prompt, await _with(renderer, [*messages[: at + 1], *after], tools), vocabulary)
        except TemplateError as error:
            raise TemplateError(f"message {at + 1}: {error}") from None
        if sampled is None:
            raise TemplateError(f"message {at + 1}: the chat template ends the turn with no token that stops a model")
        calls.append(
            Call(
                id=f"message-{at}",
                sequence=len(calls),
                status=CallStatus.OK,
                capture=CaptureLevel.TOKENS,
                prompt_token_ids=prompt,
                choices=[Choice(token_ids=sampled, logprobs=[0.0] * len(sampled))],
            )
        )
    return calls


async def _with(renderer: Renderer, messages: list[Message], tools: list[Message] | None) -> list[int]:
    return await renderer.tokenize(messages, tools, add_generation_prompt=False)


def _said(prompt: list[int], whole: list[int], vocabulary: Vocabulary) -> list[int] | None:
    """What follows the prompt up to the end of the turn, that included; None if nothing ends it."""
    if whole[: len(prompt)] != prompt:
        raise TemplateError(
            "the chat template renders the conversation before it differently once the answer follows, so what the "
            "model would have said cannot be told"
        )
    said = whole[len(prompt) :]
    end = next((place for place, token in enumerate(said) if token in vocabulary.eos_ids), None)
    return None if end is None else said[: end + 1]
