from __future__ import annotations

import pytest
import torch
from art_backends.training import head
from torch import nn


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "block"), [(1, 1), (4, 7), (5, 20), (512, 61), (512, 2048)])
def test_logprobs_and_gradient_are_log_softmaxes(rows, block, bias, monkeypatch):
    monkeypatch.setattr(head, "ROWS", rows)
    monkeypatch.setattr(head, "BLOCK", block)
    torch.manual_seed(0)
    matrix = nn.Linear(8, 61, bias=bias).requires_grad_(False)
    matrix.weight.mul_(20)  # sharp: the running maximum moves
    hidden = torch.randn(13, 8, requires_grad=True)
    tokens = torch.arange(13) * 5 % 61
    scale = torch.linspace(0.5, 2.0, 13)
    upper = torch.randn(13)
    found = head.logprobs(hidden, matrix, tokens, scale)
    expected = torch.log_softmax(matrix(hidden) * scale[:, None], -1)[torch.arange(13), tokens]
    assert torch.allclose(found, expected, atol=1e-5)
    (mine,) = torch.autograd.grad(found, hidden, upper)
    (wanted,) = torch.autograd.grad(expected, hidden, upper)
    assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(head.logprobs(hidden, matrix, tokens, scale), found)
