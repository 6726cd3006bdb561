"""Turns logits into tokens: masks, temperature, top-k, top-p, and one draw per row from the distribution that results.

All in float32. The reported log-probability is that of the distribution the token was drawn from; at temperature 0
the most likely allowed token is taken and its log-probability is that at temperature 1. A draw is made by inverting
the cumulative distribution at one uniform number from the row's own generator, the n-th for its n-th token, so a
seeded row gives the same tokens whatever else is in the batch.

It refuses penalties and logit biases.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from art_backends.engines.embedded.requests import TokenMask

_BLOCK = 256


class Draws:
    """The uniform numbers of one row: any number may be looked at ahead, each is used once."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._ahead: deque[float] = deque()

    def peek(self, place: int) -> float:
        """The number at a place from the next one (0) on."""
        while len(self._ahead) <= place:
            self._ahead.append(self._generator.random())
        return self._ahead[place]

    def use(self) -> None:
        """The next one is spent."""
        self.peek(0)
        self._ahead.popleft()


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """How one row is sampled; see ``Generation``."""

    draws: Draws
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    top_logprobs: int = 0
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """``error`` is set, and the rest meaningless, when nothing could be sampled."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


def sample(logits: torch.Tensor, rows: Sequence[Settings]) -> list[Sample]:
    """One token for each row of ``logits`` [rows, vocab].

    Settings that occur again are those of the same row's following tokens. Draws are looked at, not used: of each token
    that is kept the caller has to ``use`` one.
    """
    errors: dict[int, str] = {}
    scores = _masked(logits.float(), rows, errors)
    heats = [row.temperature if row.temperature > 0 else 1.0 for row in rows]
    if any(heat != 1.0 for heat in heats):
        scores = scores / torch.tensor(heats, device=scores.device)[:, None]
    logprobs = _truncated(torch.log_softmax(scores, dim=-1), rows)
    ids = _draw(logprobs, rows)
    chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    tops = _tops(logprobs, rows)
    found = []
    for at, (token, logprob) in enumerate(zip(ids.tolist(), chosen, strict=True)):
        if at not in errors and not -torch.inf < logprob <= 1e-3:
            errors[at] = "the model's output is not finite"
        found.append(Sample(token, min(logprob, 0.0), tops[at], errors.get(at)))
    return found


def _masked(logits: torch.Tensor, rows: Sequence[Settings], errors: dict[int, str]) -> torch.Tensor:
    for at, row in enumerate(rows):
        if row.mask is None:
            continue
        try:
            allowed = row.mask.allowed()
        except Exception as error:  # boundary: a row's own mask may fail that row only  # noqa: BLE001
            errors[at] = f"the mask of constrained output failed: {error!r}"
            continue
        if allowed is None:
            continue
        full = torch.zeros(logits.shape[1], dtype=torch.bool)
        full[: allowed.numel()] = allowed[: logits.shape[1]]
        if not bool(full.any()):
            errors[at] = "the mask of constrained output allows no token"
            continue
        logits[at].masked_fill_(~full.to(logits.device), -torch.inf)
    return logits


def _truncated(logprobs: torch.Tensor, rows: Sequence[Settings]) -> torch.Tensor:
    """Top-k, then top-p of what is left, renormalised; rows that ask for neither (or are greedy) are not touched."""
    vocab = logprobs.shape[1]
    picked = [at for at, row in enumerate(rows) if row.temperature > 0 and (row.top_p < 1.0 or 0 < row.top_k < vocab)]
    if not picked:
        return logprobs
    index = torch.tensor(picked, device=logprobs.device)
    values, order = logprobs.index_select(0, index).sort(dim=-1, descending=True, stable=True)
    ks = torch.tensor([rows[at].top_k if rows[at].top_k > 0 else vocab for at in picked], device=logprobs.device)
    ps = torch.tensor([rows[at].top_p for at in picked], device=logprobs.device)
    values = values.masked_fill(torch.arange(vocab, device=logprobs.device) >= ks[:, None], -torch.inf)
    probs = torch.softmax(values, dim=-1)
    before = probs.cumsum(-1) - probs  # mass of the more likely tokens: the first one always stays
    drop = (before >= ps[:, None]) & (ps[:, None] < 1.0)
    drop[:, 0] = False
    values = torch.log_softmax(values.masked_fill(drop, -torch.inf), dim=-1)
    logprobs[index] = torch.empty_like(values).scatter_(1, order, values)
    return logprobs


def _draw(logprobs: torch.Tensor, rows: Sequence[Settings]) -> torch.Tensor:
    """Ids [rows]: greedy rows their maximum, the others by inverting the cumulative distribution in two levels.

    The vocabulary is cut in blocks: first the block that holds the drawn mass, then the token in it.
    """
    greedy = [row.temperature <= 0 for row in rows]
    if all(greedy):
        return logprobs.argmax(-1)
    device = logprobs.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    probs = torch.nn.functional.pad(logprobs.exp(), (0, -logprobs.shape[1] % _BLOCK)).view(len(rows), -1, _BLOCK)
    blocks = probs.sum(-1, dtype=wide).cumsum(-1)
    uniform = torch.tensor(_uniform(rows), dtype=wide)
    target = uniform.to(device)[:, None] * blocks[:, -1:]
    block = _invert(blocks, target)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), torch.zeros_like(target))
    inside = probs[torch.arange(len(rows), device=device), block[:, 0]].to(wide).cumsum(-1)
    ids = (block * _BLOCK + _invert(inside, target - before))[:, 0]
    if any(greedy):
        ids = torch.where(torch.tensor(greedy, device=device), logprobs.argmax(-1), ids)
    return ids.clamp(max=logprobs.shape[1] - 1)


def _uniform(rows: Sequence[Settings]) -> list[float]:
    place: Counter[Settings] = Counter()
    found = []
    for row in rows:
        found.append(0.0 if row.temperature <= 0 else row.draws.peek(place[row]))
        place[row] += 1
    return found


def _invert(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative mass exceeds the target, at most the last place with any mass of its own."""
    place = torch.searchsorted(cumulative, target, right=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(place, last)


def _tops(logprobs: torch.Tensor, rows: Sequence[Settings]) -> list[tuple[tuple[int, float], ...]]:
    most = min(max(row.top_logprobs for row in rows), logprobs.shape[1])
    if most <= 0:
        return [()] * len(rows)
    values, ids = logprobs.topk(most, dim=-1)
    return [
        tuple((i, v) for i, v in zip(some[: row.top_logprobs], vs, strict=False) if v > -torch.inf)
        for row, some, vs in zip(rows, ids.tolist(), values.tolist(), strict=True)
    ]
