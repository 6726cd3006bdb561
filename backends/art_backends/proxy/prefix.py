"""Exact prefixes: the prompt of a call that continues an earlier call of its rollout. (Interface; body follows.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from art_backends.trajectories import Call, PromptMode

Message = dict[str, Any]


class Renderer(Protocol):
    """What an engine's /tokenize and /detokenize give. Errors: TemplateError or EngineError."""

    async def tokenize(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]: ...

    async def detokenize(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send. ``messages`` and ``tools`` (control tokens broken up) replace the request's in either mode."""

    token_ids: list[int] | None  # None: send the plain request
    mode: PromptMode
    continues: str | None  # id of the call whose tokens the prompt begins with; None when plain
    choice: int | None  # which of that call's choices
    drifted: bool
    reason: str | None
    messages: list[Message] = field(default_factory=list)  # send these instead of the request's
    tools: list[Message] | None = None  # send these instead of the request's
    broken_control_tokens: int = 0  # how many strings were broken up in messages and tools


class RolloutIndex:
    """A rollout's completed calls, indexed. Hold one per rollout; ``add`` each finished call; pass it as ``earlier``."""

    def add(self, call: Call) -> None:
        raise NotImplementedError


class Prefixer:
    def __init__(
        self,
        renderer: Renderer,
        *,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Sequence[str] = (),
        history: Literal["exact", "template"] = "exact",
        keep_reasoning: bool = True,
    ) -> None:
        raise NotImplementedError

    async def prompt(self, request: Mapping[str, Any], earlier: Sequence[Call] | RolloutIndex = ()) -> Prompt:
        raise NotImplementedError
