"""What an exchange uses, as it sees it: the policy, the maker of prompts, and the rest by name.

It refuses to hold behaviour: these are interfaces and one plain record.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from art_backends.config import Limits
from art_backends.proxy.engine import Engine
from art_backends.proxy.limits import Counters, Gate
from art_backends.proxy.observing import Observer
from art_backends.proxy.prefix import Prompt, RolloutIndex
from art_backends.proxy.recorder import Recorder


class PolicyView(Protocol):
    """What the proxy needs to know of the policy. All methods return at once."""

    name: str
    models: list[str]  # names of the app's models that it answers for; empty: all

    def version_of(self, model: str) -> str:
        """The version, "NAME@N", that answers calls of no rollout for this model name: the one that it names, else the
        one that the policy's alias stands for."""
        ...

    def lease(self, version: str) -> AbstractContextManager[str]:
        """For the length of a call: the version stays loaded. Gives the engine's name for it."""
        ...

    def claims(self, model: str) -> bool:
        """Whether this model name of an app is its own by name."""
        ...

    def answers(self, model: str) -> bool:
        """Whether it answers for this model name of an app, where no provider does."""
        ...


class Prompter(Protocol):
    """Makes the prompt of a chat request; see ``prefix.Prefixer``."""

    async def __call__(self, body: dict[str, Any], history: str, earlier: RolloutIndex | None) -> Prompt: ...


@dataclass(frozen=True)
class Services:
    """What every exchange uses."""

    engine: Engine
    recorder: Recorder
    policy: PolicyView
    prompter: Prompter
    gate: Gate
    limits: Limits
    counters: Counters
    observer: Observer
    defaults: dict[str, float] = field(default_factory=dict)  # what the engine samples with where a request is silent
    tools_by_grammar: bool = False  # the engine writes some tool calls under a grammar; see ``wire.tools_by_grammar``
    running: dict[int, tuple[str | None, float]] = field(default_factory=dict)  # id → rollout, time.monotonic()
