"""How rows are computed: by cascade with everything shared, or, for models that cannot, whole sequences one by one.

``choose`` tries the cascade out on the model itself, against the model's own forward pass, and says in a warning why
it falls back. It refuses to sample: an executor yields logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from art_backends.engines.embedded import attention
from art_backends.engines.embedded.batch import compute
from art_backends.engines.embedded.drafts import MOST, Drafts
from art_backends.engines.embedded.kv import Arena, Limits, Segment, Shape
from art_backends.engines.embedded.rows import Row
from art_backends.engines.embedded.tree import Place, Tree
from art_backends.engines.embedded.weights import Version

_log = logging.getLogger(__name__)

_TOGETHER = 8  # new rows with at most this many tokens to compute join the running ones' pass


class Executor(Protocol):
    """Called from the engine's thread only."""

    computed: int  # prompt tokens computed so far

    def admit(self, row: Row, alone: bool) -> bool:
        """Make room for a row; False: not now. ``alone``: nothing runs, so waiting would not help."""

    def settle(self) -> None:
        """After the last ``admit`` of a wave."""

    def step(
        self, version: Version, model: PreTrainedModel, rows: Sequence[Row]
    ) -> Iterator[tuple[list[Row], torch.Tensor]]:
        """Compute the next logits of these rows: batches of rows and logits [rows, vocab]; not each row every time.

        A row stands in a batch once more for each token guessed after the one to be sampled.
        """

    def learn(self, row: Row, token: int) -> None:
        """The token sampled for a row, before it enters ``row.ids``: what guesses are made from."""

    def push(self, row: Row, token: int) -> bool:
        """The token sampled for a row that goes on. True: it was guessed, the row's next logits stand in this batch.
        False: it is computed in the row's next step."""

    def release(self, row: Row, *, keep: bool) -> None:
        """The row is over; ``keep`` what it computed for later prompts."""

    def forget(self, version: Version) -> None:
        """Nothing will be asked of this version again."""

    def stats(self) -> dict[str, float]:
        """Figures for the engine's metrics."""


class Cascade:
    """Shared prefixes once, rows batched, finished rows kept. See ``kv`` and ``attention``."""

    def __init__(self, shape: Shape, limits: Limits, reach: int, guesses: int = MOST) -> None:
        self.limits = limits
        self.arena = Arena(shape, limits, reach)
        self.tree = Tree(self.arena, limits)
        self.computed = 0
        self.drafts = Drafts()
        self.guesses = guesses  # most tokens guessed at once for a row
        self.guessed = self.right = 0

    def admit(self, row: Row, alone: bool) -> bool:
        if not self.tree.has_room(len(row.ids)) and not alone:
            return False
        row.place = self.tree.place(row.version, tuple(row.ids))
        return True

    def settle(self) -> None:
        self.tree.settle()
        self.tree.has_room(0)

    def step(
        self, version: Version, model: PreTrainedModel, rows: Sequence[Row]
    ) -> Iterator[tuple[list[Row], torch.Tensor]]:
        segments = self._ready(self.tree.pending(version))
        budget = self.limits.piece - sum(len(node.tokens) for node in segments)
        running = [row for row in rows if row.sampled]
        joining: list[Row] = []
        for row in rows:
            place = _place(row)
            if row.sampled or any(node.k is None and node not in segments for node in place.parent.path()):
                continue
            if len(place.todo) <= budget or not (joining or segments):
                joining.append(row)
                budget -= len(place.todo)
        self.computed += sum(len(node.tokens) for node in segments) + sum(len(_place(row).todo) for row in joining)
        if not segments and all(len(_place(row).todo) <= _TOGETHER for row in joining):
            running, joining = running + joining, []
        for batch, nodes in ((joining, segments), (running, [])):
            places = [_place(row) for row in batch]
            for place in places:
                if len(place.slot.tokens) + len(place.todo) > self.arena.slot_tokens:
                    self.tree.spill(place.slot)
            for row in batch:
                self._guess(row, len(batch))
            repeated = [row for row in batch for _ in range(1 + len(_place(row).draft))]
            logits = compute(model, self.arena, nodes, places) if places or nodes else None
            if logits is not None:
                yield repeated, logits

    def _guess(self, row: Row, rows: int) -> None:
        """A draft for a row that runs, where there is room; not under a mask, which knows only what was sampled."""
        place, generation = _place(row), row.generation
        if not row.sampled or generation.mask is not None:
            return
        most = min(
            self.guesses,
            generation.max_tokens - row.sampled - 1,
            self.arena.reach - len(row.ids) - 1,
            self.arena.slot_tokens - len(place.slot.tokens) - len(place.todo),
        )
        place.draft = self.drafts.guess(row.trail, most, rows) if most > 0 else []
        self.guessed += len(place.draft)

    def _ready(self, pending: Sequence[Segment]) -> list[Segment]:
        """As many pending segments as one pass may compute, parents first."""
        taken: list[Segment] = []
        budget = self.limits.piece
        for node in pending:
            parent = node.parent
            stands = parent is not None and (parent.parent is None or parent.k is not None or parent in taken)
            if stands and (len(node.tokens) <= budget or not taken):
                taken.append(node)
                budget -= len(node.tokens)
        return taken

    def learn(self, row: Row, token: int) -> None:
        if self.guesses:
            self.drafts.learn(row.trail, token)

    def push(self, row: Row, token: int) -> bool:
        on = _place(row).push(token)
        self.right += on
        return on

    def release(self, row: Row, *, keep: bool) -> None:
        if row.place is not None:
            self.tree.release(row.place.slot, keep=keep)
            row.place = None

    def forget(self, version: Version) -> None:
        self.tree.forget(version)

    def stats(self) -> dict[str, float]:
        return {
            "cached_tokens": self.tree.tokens,
            "prompt_tokens_cached": self.tree.hits,
            "guessed_tokens": self.guessed,
            "guessed_tokens_right": self.right,
        }


class Plain:
    """The model's own forward pass over each whole sequence, every step anew: right for any model, and slow."""

    def __init__(self) -> None:
        self.computed = 0

    def admit(self, row: Row, alone: bool) -> bool:
        return True

    def settle(self) -> None:
        return

    def step(
        self, version: Version, model: PreTrainedModel, rows: Sequence[Row]
    ) -> Iterator[tuple[list[Row], torch.Tensor]]:
        for row in rows:
            if not row.sampled:
                self.computed += len(row.ids)
            yield [row], _whole(model, row.ids)

    def learn(self, row: Row, token: int) -> None:
        return

    def push(self, row: Row, token: int) -> bool:
        return False

    def release(self, row: Row, *, keep: bool) -> None:
        return

    def forget(self, version: Version) -> None:
        return

    def stats(self) -> dict[str, float]:
        return {}


def choose(model: PreTrainedModel, limits: Limits, reach: int, guesses: int = MOST) -> Executor:
    """The cascade if this model, tried out, gives the same logits with it; else ``Plain``, with a warning.

    Leaves the model with the attention that the executor needs.
    """
    usual = model.config._attn_implementation
    with torch.inference_mode():
        try:
            shape = _try(model, limits, reach, usual)
        except (
            NotImplementedError,
            RuntimeError,
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            IndexError,
        ) as error:
            model.set_attn_implementation(usual)
            _log.warning(
                "%s cannot share prefixes between rows (%s): every token of every row is computed anew, which is slow",
                type(model).__name__,
                error,
            )
            return Plain()
    return Cascade(shape, limits, reach, guesses)


class _Probe:
    """Stands in for a plan to see what a model's attention layers pass: records, and attends causally."""

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.seen: dict[int, tuple[torch.Size, torch.Size, torch.dtype]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self.seen[layer] = (k.shape, v.shape, k.dtype)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return attention.partial(q, k, v, scale, causal=True)[0].transpose(1, 2).contiguous()


def _try(model: PreTrainedModel, limits: Limits, reach: int, usual: str) -> Shape:
    """Compute a few tokens both ways; raises NotImplementedError (or what the model raises) if they differ."""
    config = model.config.get_text_config()
    if _rope_types(config.to_dict()) & {"dynamic", "longrope"}:
        raise NotImplementedError("its rotary embedding depends on the length of the sequence")
    vocab = int(config.vocab_size)
    prompts = [[(7 + 31 * at + (row > 0) * (at > 12) * 5 * row) % vocab for at in range(24)] for row in range(3)]
    expected = [torch.log_softmax(_whole(model, ids).float(), -1) for ids in prompts]
    model.set_attn_implementation(attention.NAME)
    probe = _Probe(reach)
    device = next(model.parameters()).device
    first = torch.tensor([prompts[0]], device=device)
    positions = torch.arange(first.shape[1], device=device)[None]
    model(input_ids=first, position_ids=positions, use_cache=False, art_plan=probe)
    shapes = set(probe.seen.values())
    if len(probe.seen) != config.num_hidden_layers or len(shapes) != 1:
        raise NotImplementedError(f"{len(probe.seen)} of its {config.num_hidden_layers} layers are plain attention")
    (key, value, dtype) = shapes.pop()
    if key != value:
        raise NotImplementedError("its keys and values differ in shape")
    shape = Shape(config.num_hidden_layers, key[1], key[3], dtype, device)
    small = replace(limits, max_rows=3, slots=3, slot_tokens=32, cache_tokens=256, min_shared=4, fold=4, piece=64)
    tree = Tree(Arena(shape, small, reach), small)
    places: list[Place] = [tree.place("try", tuple(ids[:-1])) for ids in prompts]
    tree.settle()
    compute(model, tree.arena, tree.pending("try"), places)
    for place, ids in zip(places, prompts, strict=True):
        place.todo.append(ids[-1])
    logits = compute(model, tree.arena, [], places)
    assert logits is not None
    found = torch.log_softmax(logits.float(), -1)
    likely = torch.cat(expected)
    worst = (found - likely)[likely > -12].abs().max().item()
    if not worst <= (1e-3 if dtype == torch.float32 else 0.5):
        raise NotImplementedError(f"tried out, its log-probabilities differ by {worst:.2g}")
    return shape


def _rope_types(config: object) -> set[str]:
    if not isinstance(config, dict):
        return set()
    own = {config[name] for name in ("rope_type", "type") if isinstance(config.get(name), str)}
    return own.union(*(_rope_types(value) for value in config.values()))


def _whole(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [1, vocab] of the last token of one sequence, by the model's own forward pass."""
    device = next(model.parameters()).device
    logits: torch.Tensor = model(
        input_ids=torch.tensor([list(ids)], device=device), use_cache=False, logits_to_keep=1
    ).logits
    return logits[:, -1]


def _place(row: Row) -> Place:
    assert row.place is not None
    return row.place
