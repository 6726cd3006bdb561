"""Logprobs under an output matrix, without the logits: blocks of the vocabulary, a running maximum and sum.

The gradient to the hidden state needs only the expected row of the matrix, which is summed on the way; so the
backward pass keeps one vector per place, and what exists at once is one block (rows × part of the vocabulary), small
enough for a CPU's cache.

It refuses to give the matrix itself a gradient: it is frozen here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 512  # places whose logits exist at once
BLOCK = 2048  # ids of the vocabulary at once, on a CPU; elsewhere all of them, for want of a cache to fit


def logprobs(hidden: Tensor, head: nn.Linear, tokens: Tensor, scale: Tensor) -> Tensor:
    """log softmax(scale · (W h + bias))[token] per row: hidden [n, d], tokens [n], scale [n] -> float32 [n]."""
    block = BLOCK if hidden.device.type == "cpu" else head.weight.shape[0]
    given = hidden, head.weight, head.bias, tokens, scale, block
    return _HeadLogprob.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


class _HeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd calls it by position
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, scale: Tensor, block: int
    ) -> Tensor:
        slopes = torch.empty_like(hidden) if hidden.requires_grad else None
        result = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), ROWS):
            part = slice(begin, begin + ROWS)
            result[part], expected = _block_by_block(
                hidden[part], weight, bias, tokens[part], scale[part], block, slopes is not None
            )
            if slopes is not None:
                slopes[part] = (weight[tokens[part]].float() - expected).mul_(scale[part, None]).to(hidden.dtype)
        if slopes is not None:
            ctx.save_for_backward(slopes)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (gradients[0][:, None] * slopes.float()).to(slopes.dtype), None, None, None, None, None


def _block_by_block(  # noqa: PLR0917
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, scale: Tensor, block: int, slope: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs [n] and, if ``slope``, the expectation of the matrix' rows under the softmax, float32 [n, d]."""
    largest = torch.full((len(hidden),), -torch.inf, device=hidden.device)
    total = torch.zeros_like(largest)
    chosen = torch.zeros_like(largest)
    expected = torch.zeros(hidden.shape if slope else (0, 0), dtype=torch.float32, device=hidden.device)
    for first in range(0, len(weight), block):
        rows = weight[first : first + block]
        logits = functional.linear(hidden, rows, None if bias is None else bias[first : first + block])
        logits = logits.float().mul_(scale[:, None])
        place = tokens - first
        here = logits.gather(1, place.clamp(0, len(rows) - 1)[:, None]).squeeze(1)
        chosen = torch.where((place >= 0) & (place < len(rows)), here, chosen)
        before, largest = largest, torch.maximum(largest, logits.amax(dim=-1))
        shrink = torch.exp(before - largest)
        exponentials = logits.sub_(largest[:, None]).exp_()
        total.mul_(shrink).add_(exponentials.sum(dim=-1))
        if slope and rows.dtype is torch.float32:
            expected.mul_(shrink[:, None]).addmm_(exponentials, rows)
        elif slope:
            expected.mul_(shrink[:, None]).add_(exponentials.to(rows.dtype) @ rows)
    return chosen - largest - total.log(), expected.div_(total[:, None]) if slope else expected
