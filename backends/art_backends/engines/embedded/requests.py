"""What goes into the embedded engine and what comes out: one ``Generation`` in, a stream of ``Token`` out.

It refuses to know about text, messages and HTTP: everything here is token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class TokenMask(Protocol):
    """Which tokens may be sampled next; one object per row, it may hold state. Called from the engine's thread."""

    def allowed(self) -> torch.Tensor | None:
        """A bool tensor [vocab] (True: allowed; shorter is padded with False), or None when every token is allowed."""

    def accept(self, token_id: int) -> None:
        """Called with each sampled token before the next ``allowed``."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One row to sample. ``adapter`` is a loaded version such as ``policy@3``; None is the base model."""

    prompt_ids: tuple[int, ...]
    adapter: str | None
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()  # sampling one ends the row ("stop"); the token is in the output
    top_logprobs: int = 0  # how many alternatives to report
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token.

    ``logprob`` is ln p under the distribution that was sampled from (temperature, top_p, top_k and mask applied); at
    temperature 0 that of the untempered distribution. ``top`` holds the most likely (id, logprob) of that same
    distribution, most likely first. ``finish`` is None except on the last token: "stop", "length", "abort" or "error".
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: str | None = None
