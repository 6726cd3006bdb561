"""Cascade attention: queries meet each shared segment once, their own slot apart, and the parts are merged exactly.

Softmax over a context cut in parts is the parts' softmaxes weighted by exp(log-sum-exp), so shared keys and values
need no copy per row. The function is registered with transformers as ``art_cascade``: any decoder model that calls
its attention through transformers' interface runs unchanged, on a packed batch ``[1, tokens]`` without padding.

It refuses masks, windows, soft caps, sinks and dropout: a model that asks for one gets a ``NotImplementedError``, and
the engine computes it the plain way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from art_backends.engines.embedded.kv import Arena, Segment

NAME = "art_cascade"


class Attends(Protocol):
    """What a forward pass carries to its attention layers; ``reach`` is the longest context it may hold."""

    reach: int

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [1, heads, tokens, dim], k and v [1, kv_heads, tokens, dim] -> [1, tokens, heads, dim]."""


def cascade(  # noqa: PLR0917
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    art_plan: Attends | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls; ``art_plan`` is the keyword given to the model's forward."""
    refused = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if attention_mask is not None or art_plan is None or refused:
        raise NotImplementedError(f"{type(module).__name__} asks for {refused or 'a mask, or was given no plan'}")
    window = kwargs.get("sliding_window")
    if window is not None and window < art_plan.reach:
        raise NotImplementedError(f"{type(module).__name__} has a sliding window of {window} tokens")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return art_plan.attend(layer, query, key, value, scale), None


AttentionInterface.register(NAME, cascade)


def partial(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its log-sum-exp: q [b, h, n, d], k/v [b, h, s, d] -> [b, h, n, d], float32 [b, h, n].

    ``mask`` is additive, [b, 1, n, s]. Every query must see at least one key.
    """
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu(1)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - lse[..., None]).to(v.dtype), v), lse


@dataclass(slots=True)
class Shared:
    """Tokens ``start:stop`` of the batch stand below ``segment``, which is the ``level``-th of their path."""

    segment: Segment
    level: int
    start: int
    stop: int


@dataclass(slots=True)
class Fresh:
    """Tokens ``start:stop`` of the batch are those of ``segment``, being computed now."""

    segment: Segment
    start: int
    stop: int


@dataclass(slots=True)
class Own:
    """The rows' own tokens, batched over slots (b slots, n query tokens each, padded by repeating the last).

    ``slots`` is a contiguous range of the arena or the indices to gather; ``length`` the tokens of it to look at.
    """

    slots: slice | torch.Tensor
    length: int
    width: int  # n
    queries: torch.Tensor  # [b * n] index of each query in the batch
    mask: torch.Tensor  # [b, 1, n, length] additive
    picks: torch.Tensor  # [own tokens] where each token's result stands in [b * n]
    tokens: torch.Tensor  # [own tokens] index of the token in the batch, ascending
    writes: torch.Tensor  # [own tokens] where its key and value go in the flat arena


@dataclass(frozen=True, slots=True)
class _Given:
    """One layer's input: queries [kv_heads, group, tokens, dim], keys and values [tokens, kv_heads, dim]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class _Into:
    """Where one level's result goes: part [kv_heads, group, tokens, dim], lses [kv_heads, group, tokens]."""

    part: torch.Tensor
    lses: torch.Tensor


@dataclass(slots=True)
class Plan:
    """One forward pass over a packed batch: what each token attends to. ``levels`` counts the shared ones."""

    arena: Arena
    tokens: int
    levels: int
    shared: list[Shared]
    fresh: list[Fresh]
    own: Own | None
    holes: bool  # some token has fewer than ``levels`` shared segments
    reach: int = 0
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``Attends``. Writes the new keys and values first, so a batch may hold a segment and what is below it."""
        kv_heads, dim = k.shape[1], q.shape[3]
        queries = q[0].view(kv_heads, -1, self.tokens, dim)  # [kv_heads, group, tokens, dim]
        keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
        for item in self.fresh:
            assert item.segment.k is not None
            assert item.segment.v is not None
            item.segment.k[layer] = keys[item.start : item.stop]
            item.segment.v[layer] = values[item.start : item.stop]
        size = (self.levels + 1, kv_heads, queries.shape[1], self.tokens)
        parts = torch.zeros(*size, dim, dtype=q.dtype, device=q.device) if self.holes else q.new_empty(*size, dim)
        lses = torch.full(size, -torch.inf, device=q.device) if self.holes else q.new_empty(size, dtype=torch.float32)
        given = _Given(queries, keys, values, scale)
        for below in self.shared:
            _over_segment(below, layer, given, _Into(parts[below.level], lses[below.level]))
        last = _Into(parts[-1], lses[-1])
        for item in self.fresh:
            _within_segment(item, given, last)
        if self.own is not None:
            self._over_slots(layer, given, last)
        if self.levels == 0:
            merged = parts[0]
        else:
            weights = torch.softmax(lses, dim=0)
            merged = (parts * weights[..., None].to(parts.dtype)).sum(0)
        return merged.flatten(0, 1).transpose(0, 1)[None].contiguous()

    def _over_slots(self, layer: int, given: _Given, into: _Into) -> None:
        """The rows' own tokens: new keys and values into the arena, then one batched product over the slots."""
        own, arena = self.own, self.arena
        assert own is not None
        queries, keys, values, scale = given.queries, given.keys, given.values, given.scale
        part, lses = into.part, into.lses
        alone = own.tokens.numel() == self.tokens
        arena.flat_k[layer].index_copy_(0, own.writes, keys if alone else keys.index_select(0, own.tokens))
        arena.flat_v[layer].index_copy_(0, own.writes, values if alone else values.index_select(0, own.tokens))
        k, v = arena.layers_k[layer][:, : own.length], arena.layers_v[layer][:, : own.length]
        if isinstance(own.slots, slice):
            k, v = k[own.slots], v[own.slots]
        else:
            k, v = k.index_select(0, own.slots), v.index_select(0, own.slots)
        heads, group, _, dim = queries.shape
        count, width = k.shape[0], own.width
        q = queries.index_select(2, own.queries).view(heads, group, count, width, dim)
        q = q.permute(2, 0, 1, 3, 4).reshape(count, heads, group * width, dim)
        out, lse = partial(q, k.transpose(1, 2), v.transpose(1, 2), scale, mask=self._mask(own, group))
        out = out.reshape(count, heads, group, width, dim).permute(1, 2, 0, 3, 4).reshape(heads, group, -1, dim)
        lse = lse.reshape(count, heads, group, width).permute(1, 2, 0, 3).reshape(heads, group, -1)
        if alone:
            torch.index_select(out, 2, own.picks, out=part)
            torch.index_select(lse, 2, own.picks, out=lses)
        else:
            part.index_copy_(2, own.tokens, out.index_select(2, own.picks))
            lses.index_copy_(2, own.tokens, lse.index_select(2, own.picks))

    def _mask(self, own: Own, group: int) -> torch.Tensor:
        """The mask for ``group`` query heads per key head; the same for all layers with that number."""
        if group not in self._masks:
            count, _, width, length = own.mask.shape
            wide = own.mask[:, :, None].expand(count, 1, group, width, length)
            self._masks[group] = wide.reshape(count, 1, group * width, length)
        return self._masks[group]


def _over_segment(below: Shared, layer: int, given: _Given, into: _Into) -> None:
    """All tokens below a computed segment meet its keys in one product."""
    queries = given.queries
    segment, tokens = below.segment, slice(below.start, below.stop)
    assert segment.k is not None
    assert segment.v is not None
    heads, group, _, dim = queries.shape
    q = queries[:, :, tokens].reshape(1, heads, -1, dim)
    k, v = segment.k[layer].transpose(0, 1)[None], segment.v[layer].transpose(0, 1)[None]
    out, lse = partial(q, k, v, given.scale)
    into.part[:, :, tokens] = out.view(heads, group, -1, dim)
    into.lses[:, :, tokens] = lse.view(heads, group, -1)


def _within_segment(item: Fresh, given: _Given, into: _Into) -> None:
    """The tokens of a segment being computed attend to each other, each to those before it."""
    tokens = slice(item.start, item.stop)
    heads, group, _, dim = given.queries.shape
    q = given.queries[:, :, tokens].flatten(0, 1)[None]
    k = given.keys[tokens].transpose(0, 1).repeat_interleave(group, dim=0)[None]
    v = given.values[tokens].transpose(0, 1).repeat_interleave(group, dim=0)[None]
    out, lse = partial(q, k, v, given.scale, causal=True)
    into.part[:, :, tokens] = out.reshape(heads, group, -1, dim)
    into.lses[:, :, tokens] = lse.reshape(heads, group, -1)
