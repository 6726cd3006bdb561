"""Tile attention against dense attention under an ancestor mask, forward and backward."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from art_backends.training import attention
from art_backends.training.attention import attend, tiles
from torch.nn import functional


def forest(seed: int) -> list[int]:
    """Parents of a random forest in depth-first order: nested forks, chains, single tokens, new roots."""
    draw = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []
    while len(parents) < 90:
        del path[draw.randint(0, len(path)) :]
        for _ in range(draw.choice([1, 1, 2, 5, 15])):
            parents.append(path[-1] if path else -1)
            path.append(len(parents) - 1)
    return parents


SHAPES = {
    "one chain": lambda _: list(range(-1, 39)),
    "one token": lambda _: [-1],
    "roots only": lambda _: [-1] * 9,
    "a comb of one-token segments": lambda _: [-1, *(p for at in range(0, 30, 2) for p in (at, at))],
    "two roots behind a long path": lambda _: [*range(-1, 549), -1, 550, 551, -1],
    **{f"random {seed}": forest for seed in range(6)},
}


def seen(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for index, parent in enumerate(parents):
        if parent >= 0:
            mask[index] = mask[parent]
        mask[index, index] = True
    return mask


def states(length: int, heads: int, kv_heads: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, count, length, 16, generator=generator) for count in (heads, kv_heads, kv_heads)]
    return [item.to(dtype).requires_grad_() for item in made]


def dense(query, key, value, mask, scale):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def worst(found, expected) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernel", ["fused", "plain"])
@pytest.mark.parametrize("size", [1, 8, 128])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_equals_dense_attention_and_so_do_its_gradients(shape, size, kernel, monkeypatch):
    if kernel == "plain":  # what other devices than a CPU compute with
        monkeypatch.setattr(attention, "_fused", lambda _device: False)
    parents = SHAPES[shape](int(shape.split()[-1]) if shape.startswith("random") else 0)
    given = states(len(parents), 6, 2)
    upper = torch.randn(1, len(parents), 6, 16, generator=torch.Generator().manual_seed(9))
    plan = tiles(np.asarray(parents), torch.device("cpu"), size)
    module = torch.nn.Identity()
    found, _ = attend(module, *given, plan.placeholder, scaling=0.3, art_tree=plan)
    expected = dense(*given, seen(parents), 0.3)
    assert worst([found], [expected]) < 1e-5
    assert worst(torch.autograd.grad(found, given, upper), torch.autograd.grad(expected, given, upper)) < 1e-4


def test_tiles_see_their_path_and_themselves():
    plan = tiles(np.asarray([-1, 0, 1, 2, 1, 4, -1]), torch.device("cpu"), 2)
    assert [(tile.start, tile.stop) for tile in plan.tiles] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [tile.keys.tolist() for tile in plan.tiles] == [[0, 1], [0, 1, 2, 3], [0, 1, 4, 5], [6]]
    assert all(float(tile.mask.max()) == 0.0 for tile in plan.tiles)


def test_bfloat16_is_near_float32():
    parents = forest(3)
    plan = tiles(np.asarray(parents), torch.device("cpu"), 16)
    given = states(len(parents), 4, 4, dtype=torch.bfloat16)
    found, _ = attend(torch.nn.Identity(), *given, plan.placeholder, art_tree=plan)
    exact = dense(*(item.float() for item in given), seen(parents), None)
    assert found.dtype is torch.bfloat16
    assert worst([found.float()], [exact]) < 0.05
    assert all(torch.isfinite(item).all() for item in torch.autograd.grad(found.float().sum(), given))


@pytest.mark.parametrize(
    "asked",
    [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}, {"attention_mask": torch.zeros(1, 1, 4, 4)}],
)
def test_what_tiles_cannot_express_is_refused(asked):
    plan = tiles(np.asarray([-1, 0, 1, 2]), torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="Identity asks for"):
        attend(torch.nn.Identity(), *states(4, 4, 2), **{"attention_mask": plan.placeholder, "art_tree": plan, **asked})


def test_a_model_that_drops_the_tiles_is_refused_and_without_them_it_is_the_usual_attention():
    given = states(4, 2, 2)
    with pytest.raises(NotImplementedError, match="does not pass the tiles on"):
        attend(torch.nn.Identity(), *given, torch.ones(1, 1, 1, 1, dtype=torch.bool))
    found, _ = attend(torch.nn.Identity(), *given, None, is_causal=True)
    assert worst([found], [dense(*given, torch.ones(4, 4).tril().bool(), None)]) < 1e-6
