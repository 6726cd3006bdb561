"""The base model, and for each adapter version a model whose linear weights are merged copies.

The base is never written: merging and unmerging in place drifts. A version's model shares every tensor that its
adapter does not change. On a CPU the linear weights are also kept in oneDNN's blocked layout, which multiplies 1.2
to 2 times faster; that is one more copy of the linear weights, shared by all versions where they are not changed.
At most ``keep`` merged models stay in memory besides those in use; others are merged again from their folder.

It refuses to read anything but safetensors.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from art_backends.engines.embedded.adapters import Delta, read
from art_backends.errors import ModelNotFoundError

_log = logging.getLogger(__name__)

_PACK_ROWS = 32  # the number of rows oneDNN lays the weights out for: a usual decode batch


def load_base(path: Path, *, dtype: torch.dtype = torch.float32, device: str = "auto") -> PreTrainedModel:
    """A causal language model from a local folder of safetensors; ``device`` is auto, cpu, cuda, cuda:N or mps.

    Raises ModelNotFoundError when the folder holds no such model.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"{path}: no causal language model with safetensors weights: {error}") from error
    torch.nn.Module.to(model, resolve_device(device))
    loaded: PreTrainedModel = model.train(mode=False).requires_grad_(False)
    return loaded


def resolve_device(device: str) -> torch.device:
    """``auto`` is CUDA if there is one, else Apple's GPU, else the CPU."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class PackedLinear(torch.nn.Module):
    """A linear module on a CPU whose weight is laid out for oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        return result


class Version:
    """An adapter version that can be asked for; identity matters, not the name: a name may be loaded anew."""

    def __init__(self, name: str | None, path: Path | None) -> None:
        self.name = name  # None: the base
        self.path = path
        self.rows = 0  # rows that run or wait with it
        self.retired = False  # unloaded: no new rows

    def __repr__(self) -> str:
        return f"Version({self.name or 'base'})"


class Weights:
    """Merged models by version, least recently used first. ``check`` from any thread, the rest from the engine's."""

    def __init__(self, base: PreTrainedModel, *, keep: int = 2, pack: bool = True) -> None:
        self.base = _view(base, {})
        self.keep = keep
        self.merges = 0
        self._linears = {name: module for name, module in self.base.named_modules() if type(module) is torch.nn.Linear}
        parameter = next(base.parameters())
        self.packs = pack and parameter.device.type == "cpu" and _can_pack(parameter.dtype)
        self._shared: dict[str, torch.nn.Module] = {}
        self._models: dict[Version, PreTrainedModel] = {}

    def check(self, path: Path) -> dict[str, Delta]:
        """Read an adapter and raise AdapterError if it does not fit the base."""
        return read(path, {name: (module.out_features, module.in_features) for name, module in self._linears.items()})

    def model(self, version: Version) -> PreTrainedModel:
        """The model of a version, merged now if it is not in memory. Raises AdapterError."""
        model = self._models.pop(version, None)
        if model is None:
            deltas = self.check(version.path) if version.path is not None else {}
            model = self._merge(deltas)
        self._models[version] = model  # most recently used last
        self._evict()
        return model

    def drop(self, version: Version) -> None:
        self._models.pop(version, None)

    def merged(self) -> Iterable[Version]:
        return [version for version in self._models if version.name is not None]

    def _evict(self) -> None:
        idle = [version for version in self.merged() if version.rows == 0]
        for version in idle[: max(0, len(idle) - self.keep)]:
            del self._models[version]

    def _merge(self, deltas: Mapping[str, Delta]) -> PreTrainedModel:
        """A second model over the base's tensors, with new linear modules where the adapter changes something."""
        memo: dict[int, object] = {}
        with torch.no_grad():
            for name, linear in self._linears.items():
                if name in deltas:
                    memo[id(linear)] = self._linear(_merged_weight(linear.weight, deltas[name]), linear.bias)
                elif self.packs:
                    if name not in self._shared:
                        self._shared[name] = self._linear(linear.weight, linear.bias)
                    memo[id(linear)] = self._shared[name]
        self.merges += bool(deltas)
        return _view(self.base, memo)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
        if self.packs:
            return PackedLinear(weight, bias)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        linear.bias = bias  # type: ignore[assignment]
        return linear.eval()


def _view(model: PreTrainedModel, memo: dict[int, object]) -> PreTrainedModel:
    """A second set of modules, with a configuration of its own, over the same tensors; ``memo`` replaces objects."""
    memo.update((id(tensor), tensor) for tensor in (*model.parameters(), *model.buffers()))
    return copy.deepcopy(model, memo)


def _merged_weight(weight: torch.Tensor, delta: Delta) -> torch.Tensor:
    """Computed in float32, rounded once."""
    a, b = delta.a.to(weight.device).float(), delta.b.to(weight.device).float()
    return torch.addmm(weight.detach().float(), b, a, alpha=delta.scale).to(weight.dtype)


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product works here, tried out."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.linspace(-1, 1, 64 * 48).view(64, 48).to(dtype)
        inputs = torch.linspace(-1, 1, 48).view(1, 1, 48).to(dtype)
        difference = (PackedLinear(weight, None)(inputs) - inputs @ weight.t()).abs().max().item()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        _log.info("oneDNN's packed linear weights are not available: %s", error)
        return False
    return bool(difference < (1e-4 if dtype == torch.float32 else 0.5))
