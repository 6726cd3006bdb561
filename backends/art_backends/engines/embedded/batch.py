"""Packs rows and segments into one forward pass: no padding in the model, and the logits of each row's last tokens.

It refuses to sample and to schedule: it computes what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from art_backends.engines.embedded.attention import Fresh, Own, Plan, Shared
from art_backends.engines.embedded.kv import Arena, Segment
from art_backends.engines.embedded.tree import Place


@dataclass(slots=True)
class _Chunk:
    key: tuple[int, ...]
    path: tuple[Segment, ...]
    tokens: Sequence[int]
    position: int
    target: Segment | Place


def compute(
    model: PreTrainedModel, arena: Arena, segments: Sequence[Segment], places: Sequence[Place]
) -> torch.Tensor | None:
    """Compute ``segments`` and the ``todo`` of ``places`` in one pass; all they stand on is computed or in the batch.

    Returns logits [n, vocab]: for each place, in the order given, those of its last token to do and of each token of
    its draft; None without places. Afterwards the segments hold their keys and values, and the places are ``computed``.
    """
    chunks = _order(segments, places)
    plan = _plan(arena, chunks)
    device = arena.shape.device
    ids = torch.tensor([[token for chunk in chunks for token in chunk.tokens]], device=device)
    positions = torch.tensor(
        [[chunk.position + offset for chunk in chunks for offset in range(len(chunk.tokens))]], device=device
    )
    ends: dict[int, range] = {}
    at = 0
    for chunk in chunks:
        at += len(chunk.tokens)
        if isinstance(chunk.target, Place):
            ends[id(chunk.target)] = range(at - 1 - len(chunk.target.draft), at)
    # Without places one position is still asked for: 0 would mean "all logits".
    keep = torch.tensor([at for place in places for at in ends[id(place)]] or [0], device=device)
    logits: torch.Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, art_plan=plan
    ).logits
    for place in places:
        place.computed()
    return logits[0] if places else None


def _order(segments: Sequence[Segment], places: Sequence[Place]) -> list[_Chunk]:
    """Depth first, so that all tokens below a segment are neighbours."""
    chunks = []
    for segment in segments:
        path = segment.path()
        key = (*(node.uid for node in path), 0)
        chunks.append(_Chunk(key, path[:-1], segment.tokens, segment.start, segment))
    for place in places:
        path = place.parent.path()
        key = (*(node.uid for node in path), 0, place.slot.index)
        position = place.parent.end + len(place.slot.tokens)
        chunks.append(_Chunk(key, path, place.fresh, position, place))
    return sorted(chunks, key=lambda chunk: chunk.key)


def _plan(arena: Arena, chunks: list[_Chunk]) -> Plan:
    shape = arena.shape
    shared: dict[int, Shared] = {}
    fresh: list[Fresh] = []
    rows: list[tuple[Place, int]] = []
    at = 0
    for chunk in chunks:
        stop = at + len(chunk.tokens)
        for level, node in enumerate(chunk.path):
            if node.uid in shared:
                shared[node.uid].stop = stop
            else:
                shared[node.uid] = Shared(node, level, at, stop)
        if isinstance(chunk.target, Segment):
            node = chunk.target
            node.k = torch.empty(
                (shape.layers, len(node.tokens), shape.heads, shape.dim), dtype=shape.dtype, device=shape.device
            )
            node.v = torch.empty_like(node.k)
            fresh.append(Fresh(node, at, stop))
        else:
            rows.append((chunk.target, at))
        at = stop
    levels = max(len(chunk.path) for chunk in chunks)
    holes = any(len(chunk.path) < levels for chunk in chunks)
    return Plan(
        arena, at, levels, list(shared.values()), fresh, _own(arena, rows) if rows else None, holes, arena.reach
    )


def _own(arena: Arena, rows: list[tuple[Place, int]]) -> Own:
    """The batched part: one entry per slot, either a whole range of the arena or, if rows are scattered, gathered."""
    device = arena.shape.device
    width = max(place.size for place, _ in rows)
    length = max(len(place.slot.tokens) + place.size for place, _ in rows)
    indices = [place.slot.index for place, _ in rows]
    low, high = min(indices), max(indices) + 1
    entry: dict[int, int]  # slot index -> entry of the batch
    slots: slice | torch.Tensor
    if high - low <= 1.5 * len(rows):
        slots, entry = slice(low, high), {index: index - low for index in indices}
        count = high - low
    else:
        slots, entry = torch.tensor(indices, device=device), {index: at for at, index in enumerate(indices)}
        count = len(rows)
    queries = [[0] * width for _ in range(count)]
    limits = [[length] * width for _ in range(count)]  # entries without a row look at anything: never read
    picks: list[int] = []
    tokens: list[int] = []
    writes: list[int] = []
    for place, start in rows:
        row, held, new = entry[place.slot.index], len(place.slot.tokens), place.size
        for offset in range(width):
            inside = min(offset, new - 1)
            queries[row][offset] = start + inside
            limits[row][offset] = held + inside + 1
        for offset in range(new):
            picks.append(row * width + offset)
            tokens.append(start + offset)
            writes.append(place.slot.index * arena.slot_tokens + held + offset)
    seen = torch.arange(length, device=device) < torch.tensor(limits, device=device)[..., None]
    mask = torch.zeros(seen.shape, dtype=arena.shape.dtype, device=device).masked_fill_(~seen, -torch.inf)
    return Own(
        slots,
        length,
        width,
        torch.tensor(queries, device=device).flatten(),
        mask[:, None],
        torch.tensor(picks, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(writes, device=device),
    )
