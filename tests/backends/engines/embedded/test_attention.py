"""Parts of an attention merged by log-sum-exp equal the whole; the CPU's kernel equals the general formula."""

from __future__ import annotations

import pytest
import torch
from art_backends.engines.embedded.attention import cascade, partial
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize("masked", [False, True])
def test_partial_gives_attention_and_its_log_sum_exp(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator) for n in (5, 7, 7))
    mask = torch.zeros(2, 1, 5, 7)
    if masked:
        mask[:, :, :, 4:] = -torch.inf
    out, lse = partial(q, k, v, 0.3, mask=mask if masked else None)
    scores = q @ k.transpose(2, 3) * 0.3 + mask
    assert torch.allclose(out, scores.softmax(-1) @ v, atol=1e-5)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)


def test_parts_merge_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (4, 9, 9))
    parts = [partial(q, k[:, :, at], v[:, :, at], 8**-0.5) for at in (slice(0, 5), slice(5, 9))]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    merged = (torch.stack([out for out, _ in parts]) * weights[..., None]).sum(0)
    assert torch.allclose(merged, scaled_dot_product_attention(q, k, v), atol=1e-5)


def test_causal() -> None:
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(2))
    expected = scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.allclose(partial(q, q, q, 8**-0.5, causal=True)[0], expected, atol=1e-5)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.ones(1)}, {}])
def test_what_it_cannot_express_is_refused(extra: dict[str, object]) -> None:
    q = torch.ones(1, 1, 1, 4)
    with pytest.raises(NotImplementedError):
        cascade(torch.nn.Identity(), q, q, q, None, **extra)
