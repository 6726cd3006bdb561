"""A linear layer and its LoRA in one step of autograd: y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ.

PEFT's layers compute the same with a pass over the whole output for the scale, another for the sum, and a gradient of
B in a shape that BLAS is slow at. Here the low-rank part is added by the product itself, forward and backward.

It refuses everything but a plain ``nn.Linear`` with one plain LoRA without dropout, in one dtype: PEFT's own forward
goes on to compute the rest, and the layer while its adapter is switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional


class _LoraLinear(torch.autograd.Function):
    """x [n, in], weight [out, in], bias [out] or None, a [r, in], b [out, r] -> [n, out]; W is frozen."""

    @staticmethod
    def forward(  # noqa: PLR0917  # autograd calls it by position
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        low = (x @ a.t()).mul_(scale)
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scale = scale
        return functional.linear(x, weight, bias).addmm_(low, b.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, low, weight, a, b = ctx.saved_tensors
        upper = gradients[0]
        to_low = (upper @ b).mul_(ctx.scale)
        to_x = (upper @ weight).addmm_(to_low, a) if ctx.needs_input_grad[0] else None
        return to_x, None, None, to_low.t() @ x, (low.t() @ upper).t(), None


def fuse(model: nn.Module) -> int:
    """Let the LoRA layers of a PEFT model whose base is frozen compute in one step; returns how many do."""
    count = 0
    for module in model.modules():
        if type(module) is Linear and _is_plain(module):
            if "forward" not in vars(module):
                module.forward = partial(_forward, module, module.forward)  # type: ignore[method-assign]
            count += 1
    return count


def _is_plain(module: Linear) -> bool:
    base, names = module.get_base_layer(), list(module.lora_A)
    return (
        type(base) is nn.Linear
        and not base.weight.requires_grad
        and len(names) == 1
        and module.active_adapters == names
        and not module.lora_variant
        and isinstance(module.lora_dropout[names[0]], nn.Identity)
        and type(module.lora_A[names[0]]) is nn.Linear
        and type(module.lora_B[names[0]]) is nn.Linear
        and module.lora_B[names[0]].bias is None
    )


def _forward(module: Linear, usual: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    base: Any = module.get_base_layer()
    (name,) = module.lora_A
    a: Any = module.lora_A[name].weight
    b: Any = module.lora_B[name].weight
    kind = base.weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        fits = torch.get_autocast_dtype(x.device.type) is kind  # what autocast would cast all of them to
    else:
        fits = x.dtype is kind and a.dtype is kind
    if args or kwargs or not fits or module.disable_adapters or module.merged:
        return usual(x, *args, **kwargs)
    given = x.to(kind).flatten(0, -2), base.weight, base.bias, a.to(kind), b.to(kind), module.scaling[name]
    found: Tensor = _LoraLinear.apply(*given)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], -1)
