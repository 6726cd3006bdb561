"""Where keys and values live: segments that rows share, and an arena with a slot for what each row has alone.

A context is a path of *segments* (each holds the keys and values of a run of tokens, once, for all rows below it)
followed by one *slot* of the arena. ``tree`` decides what goes where.

Bounds: at most ``Limits.slots`` slots of ``Limits.slot_tokens`` tokens (the arena, allocated once), and at most
``Limits.cache_tokens`` tokens and ``Limits.cache_bytes`` bytes in segments. Over that the least recently used leaves
go; what running rows stand on never goes, so running rows alone may exceed the bound, by at most max_rows x
max_model_len tokens.

It refuses to know about models, rows and adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from art_backends.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the engine's batch and caches; all in rows or tokens."""

    max_rows: int = 64  # rows computed at once; more wait
    max_waiting: int = 8192  # rows in the queue; more are refused
    slots: int = 128  # rows that own a slot: running ones and finished ones kept for their next turn
    slot_tokens: int = 256  # tokens in a slot; a row that has more of its own moves them into a segment
    cache_tokens: int = 65536  # tokens in segments, and
    cache_bytes: int = 4 << 30  # bytes in segments; the arena of slots is held to the same size
    min_shared: int = 8  # a shared run of tokens shorter than this is computed by each row
    fold: int = 64  # a run of prompt tokens that only one row has goes into its slot if not longer than this
    piece: int = 512  # most prompt tokens computed in one forward pass between two decode steps

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.min_shared < 1 or self.piece < 1 or self.fold < self.min_shared:
            raise ConfigError("engine limits: max_rows, min_shared and piece must be positive, fold >= min_shared")
        if self.slots < self.max_rows or self.slot_tokens <= self.fold:
            raise ConfigError("engine limits: slots must be >= max_rows and slot_tokens > fold")


@dataclass(frozen=True, slots=True)
class Shape:
    """Keys and values of one token: layers x heads x dim, times two, in ``dtype``."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes that one token's keys and values take."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


_uids = count(1)


class Segment:
    """A run of tokens below ``parent``; ``k`` and ``v`` [layers, tokens, heads, dim] are None until computed."""

    __slots__ = ("children", "k", "parent", "slots", "start", "tokens", "uid", "used", "v")

    def __init__(self, tokens: tuple[int, ...], parent: Segment | None, start: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.start = start  # position of the first token in the whole context
        self.children: list[Segment] = []
        self.slots: list[Slot] = []
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.uid = next(_uids)
        self.used = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> tuple[Segment, ...]:
        """From below the root to this segment; empty for a root."""
        found = []
        node: Segment | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return tuple(reversed(found))


class Slot:
    """A place in the arena: the computed ``tokens`` of one row, below ``parent``."""

    __slots__ = ("busy", "index", "parent", "tokens", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.parent: Segment | None = None
        self.tokens: list[int] = []
        self.busy = False
        self.used = 0


class Arena:
    """Keys and values of all slots: per layer ``k``/``v`` [slots, slot_tokens, heads, dim], zero at first.

    Zero, not empty: what is masked is still multiplied by a weight of 0, and 0 x NaN is NaN.
    """

    def __init__(self, shape: Shape, limits: Limits, reach: int) -> None:
        self.shape = shape
        self.reach = reach  # the longest context a row may have
        self.slot_tokens = limits.slot_tokens
        affordable = limits.cache_bytes // (limits.slot_tokens * shape.token_bytes)
        self.slots = max(limits.max_rows, min(limits.slots, affordable))
        size = (shape.layers, self.slots, limits.slot_tokens, shape.heads, shape.dim)
        self.k = _lazy_zeros(size, shape)
        self.v = _lazy_zeros(size, shape)
        self.flat_k = [layer.view(-1, shape.heads, shape.dim) for layer in self.k]
        self.flat_v = [layer.view(-1, shape.heads, shape.dim) for layer in self.v]
        self.layers_k = list(self.k)
        self.layers_v = list(self.v)


def _lazy_zeros(size: tuple[int, ...], shape: Shape) -> torch.Tensor:
    """Zeros; on a CPU from pages that cost nothing until they are written."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    raw = np.zeros(int(np.prod(size)) * shape.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(shape.dtype).view(size)
