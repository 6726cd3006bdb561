"""Attention over a tree pack, tile by tile, without a mask of the whole pack.

A pack lies in depth-first order, so whatever the tokens of a *tile* (some neighbours in that order) attend to before
the tile stands on one path: that of its first token. A tile is therefore one rectangle, its tokens against that path
and the tile itself, with one softmax per token. The cost is tokens × depth, not tokens × tokens, and the number of
products does not grow with the number of forks. The backward pass recomputes the scores from their log-sum-exp.

The function is registered with transformers as ``art_tree``; the tiles travel as the keyword ``art_tree`` of the
model's forward. Without them it is transformers' own ``sdpa``. It refuses soft caps, sinks, position biases, dropout
and models that change the mask (ALiBi): ``NotImplementedError``, and the caller computes the pack in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from art_backends.training.sequences import Ints

NAME = "art_tree"
TILE = 128  # tokens: fewer make more products, more see more of each other's masked branches

_functions: Mapping[str, Any] = AttentionInterface()  # type: ignore[no-untyped-call]
_masks: Mapping[str, Any] = AttentionMaskInterface()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Tile:
    """Tokens ``start:stop`` of the pack; ``keys`` [K] are the indices of what they may see, ``mask`` [stop − start, K]
    is additive: 0 where a token does see it, −∞ elsewhere."""

    start: int
    stop: int
    keys: Tensor
    mask: Tensor


@dataclass
class Tiles:
    """All tiles of a pack. ``placeholder`` is what the model is given as its mask, lest it makes one of its own."""

    tiles: list[Tile]
    placeholder: Tensor
    _wide: dict[tuple[int, torch.dtype], list[Tensor]] = field(default_factory=dict)

    def masks(self, group: int, dtype: torch.dtype) -> list[Tensor]:
        """The tiles' masks for ``group`` query heads per key head, [group · tokens, K]; made once for all layers."""
        if (group, dtype) not in self._wide:
            self._wide[group, dtype] = [tile.mask.to(dtype).repeat(group, 1) for tile in self.tiles]
        return self._wide[group, dtype]


def tiles(parents: Ints, device: torch.device, size: int = TILE) -> Tiles:
    """The tiles of a tree pack whose ``parents`` [length] are in depth-first order, −1 at a root."""
    found = []
    above = parents.tolist()
    for start in range(0, len(above), size):
        stop = min(start + size, len(above))
        path = []
        at = above[start]
        while at >= 0:
            path.append(at)
            at = above[at]
        path.reverse()
        place = {token: depth for depth, token in enumerate(path, start=1)}
        sees = np.zeros((stop - start, len(path) + stop - start), dtype=np.bool_)
        for token in range(start, stop):
            parent = above[token]
            row = sees[token - start]
            if parent >= start:
                row[:] = sees[parent - start]
            elif parent >= 0:
                row[: place[parent]] = True
            row[len(path) + token - start] = True
        keys = torch.tensor([*path, *range(start, stop)], device=device)
        mask = torch.zeros(sees.shape).masked_fill_(torch.from_numpy(~sees), -torch.inf)
        found.append(Tile(start, stop, keys, mask.to(device)))
    return Tiles(found, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device))


def attend(  # noqa: PLR0917  # transformers calls it by position
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    art_tree: Tiles | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim] -> [1, tokens, heads, dim]."""
    if art_tree is None:
        if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
            raise NotImplementedError(f"{type(module).__name__} does not pass the tiles on")
        usual: tuple[Tensor, None] = _functions["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return usual
    refused = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if refused or dropout or attention_mask is None or attention_mask.shape != art_tree.placeholder.shape:
        raise NotImplementedError(f"{type(module).__name__} asks for {refused or 'dropout or a mask of its own'}")
    if query.shape[-1] != value.shape[-1] or query.shape[1] % key.shape[1]:
        raise NotImplementedError(f"{type(module).__name__} has queries and values of different shapes")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    kind = value.dtype
    return _TreeAttention.apply(query.to(kind), key.to(kind), value, art_tree, scale), None  # type: ignore[no-untyped-call]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _masks["sdpa"])  # where no tiles are given


@dataclass(frozen=True, slots=True)
class _Given:
    """One tile's product: query [1, kv_heads, group·n, dim], key and value [1, kv_heads, K, dim], mask [group·n, K]."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    scale: float

    @classmethod
    def of(cls, states: tuple[Tensor, Tensor, Tensor], tile: Tile, mask: Tensor, scale: float) -> _Given:
        query, key, value = states
        return cls(
            _fold(query, tile, key.shape[1]),
            key.index_select(2, tile.keys),
            value.index_select(2, tile.keys),
            mask,
            scale,
        )


class _TreeAttention(torch.autograd.Function):
    """Each tile's softmax attention; keeps queries, keys, values, the result and its log-sum-exp."""

    @staticmethod
    def forward(  # noqa: PLR0917  # autograd calls it by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: Tiles, scale: float
    ) -> Tensor:
        _, heads, length, dim = query.shape
        kv_heads = key.shape[1]
        out = torch.empty(1, length, heads, dim, dtype=query.dtype, device=query.device)
        sums = []
        for tile, mask in zip(plan.tiles, plan.masks(heads // kv_heads, query.dtype), strict=True):
            found, log_sum = _forward(_Given.of((query, key, value), tile, mask, scale))
            out[0, tile.start : tile.stop] = found.reshape(heads, -1, dim).transpose(0, 1)
            sums.append(log_sum)
        ctx.save_for_backward(query, key, value, out, *sums)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, *sums = ctx.saved_tensors
        _, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        upper, out = gradients[0].transpose(1, 2), out.transpose(1, 2)
        to_query = torch.empty_like(query)
        to_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)  # sums of many tiles
        to_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
        masks = ctx.plan.masks(heads // kv_heads, query.dtype)
        for tile, mask, log_sum in zip(ctx.plan.tiles, masks, sums, strict=True):
            by_query, by_key, by_value = _backward(
                _Given.of((query, key, value), tile, mask, ctx.scale),
                _fold(upper, tile, kv_heads),
                _fold(out, tile, kv_heads),
                log_sum,
            )
            to_query[0, :, tile.start : tile.stop] = by_query.reshape(heads, -1, dim)
            to_key.index_add_(2, tile.keys, by_key.float())
            to_value.index_add_(2, tile.keys, by_value.float())
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None, None


def _fold(states: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    """The tile's part of [1, heads, tokens, dim] as [1, kv_heads, group · tokens, dim]: one product per key head."""
    part = states[:, :, tile.start : tile.stop]
    return part.reshape(1, kv_heads, -1, part.shape[-1])


def _fused(device: torch.device) -> bool:
    """Whether there is a kernel that gives and takes the log-sum-exp under a mask."""
    return device.type == "cpu"


def _forward(given: _Given) -> tuple[Tensor, Tensor]:
    """Softmax attention [1, h, n, d] and its log-sum-exp [1, h, n] of one tile."""
    query, key, value = given.query, given.key, given.value
    if _fused(query.device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, False, attn_mask=given.mask[None, None], scale=given.scale
        )
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(query, key.transpose(2, 3)).float().mul_(given.scale).add_(given.mask)
        log_sum = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(log_sum[..., None]).exp_()
        return torch.matmul(weights.to(value.dtype), value), log_sum


def _backward(given: _Given, gradient: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to query, key and value from that to the result, the result itself and its log-sum-exp."""
    query, key, value = given.query, given.key, given.value
    if _fused(query.device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            gradient, query, key, value, out, log_sum, 0.0, False, attn_mask=given.mask[None, None], scale=given.scale
        )
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(query, key.transpose(2, 3)).float().mul_(given.scale).add_(given.mask)
        weights = scores.sub_(log_sum[..., None]).exp_()
        by_value = torch.matmul(weights.to(value.dtype).transpose(2, 3), gradient)
        moved = torch.matmul(gradient, value.transpose(2, 3)).float()
        moved.sub_((gradient.float() * out.float()).sum(-1, keepdim=True)).mul_(weights).mul_(given.scale)
        slopes = moved.to(query.dtype)
        return torch.matmul(slopes, key), torch.matmul(slopes.transpose(2, 3), query), by_value
