"""Merged models: exact, beside an untouched base, shared where nothing changes, few in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from art_backends.engines.embedded.weights import PackedLinear, Version, Weights, load_base
from art_backends.errors import ModelNotFoundError
from transformers import PreTrainedModel


@pytest.mark.parametrize("pack", [False, True])
@torch.no_grad()
def test_merged_is_base_plus_delta(
    pack: bool, new_model: Callable[..., PreTrainedModel], new_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    base = new_model()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    weights = Weights(base, pack=pack)
    folder = new_adapter(tmp_path / "a")
    model: Any = weights.model(Version("policy@1", folder))
    name = "model.layers.1.mlp.down_proj"
    delta = weights.check(folder)[name]
    weight = base.get_submodule(name).weight
    inputs = torch.randn(3, 64)
    expected = inputs @ (weight + delta.scale * delta.b @ delta.a).T
    assert torch.allclose(model.get_submodule(name)(inputs), expected, atol=1e-4)
    assert isinstance(model.get_submodule(name), PackedLinear) == (pack and weights.packs)
    assert model.model.embed_tokens.weight is base.get_submodule("model.embed_tokens").weight
    assert model.config is not base.config
    assert all(torch.equal(tensor, before[key]) for key, tensor in base.state_dict().items())
    plain = weights.model(Version(None, None))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.allclose(plain(ids).logits, base(ids).logits, atol=1e-4)


def test_only_some_idle_versions_stay(
    new_model: Callable[..., PreTrainedModel], new_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    weights = Weights(new_model(), keep=1, pack=False)
    versions = [Version(f"policy@{n}", new_adapter(tmp_path / str(n), seed=n)) for n in range(4)]
    versions[0].rows = 1  # runs
    for version in versions:
        weights.model(version)
    assert set(weights.merged()) == {versions[0], versions[3]}
    weights.model(versions[1])
    assert weights.merges == 5
    weights.drop(versions[1])
    assert versions[1] not in weights.merged()


def test_base_from_a_folder(new_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    new_model().save_pretrained(tmp_path / "model")
    model = load_base(tmp_path / "model", dtype=torch.bfloat16, device="cpu")
    assert next(model.parameters()).dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ModelNotFoundError, match="no causal language model"):
        load_base(tmp_path / "nothing")
