from __future__ import annotations

import math

import pytest
import torch
from art_backends.training.losses import importance, kl_of_step, kl_to_reference, policy_loss

E = math.exp(1)


def one(ratio: float, advantage: float, *, mu: float = -1.0, old: float = -1.0, **changes):
    """Loss and gradient of a single token with weight 1."""
    new = torch.tensor([old + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    options = {"epsilon_low": 0.2, "epsilon_high": 0.3, "cap": 2.0, **changes}
    tensor = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    terms = policy_loss(new, tensor(old), tensor(mu), tensor(advantage), tensor(1.0), **options)
    terms.loss.backward()
    return terms, float(terms.loss.detach()), float(new.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the gradient is −A
        (1.2, 2.0, -2.4, -2.4),  # within the clip: −r·A
        (1.5, 2.0, -2.6, 0.0),  # above 1 + 0.3, A > 0: clipped, no gradient
        (1.5, -2.0, 3.0, 3.0),  # above, A < 0: not clipped
        (0.5, -2.0, 1.6, 0.0),  # below 1 − 0.2, A < 0: clipped
        (0.5, 2.0, -1.0, -1.0),  # below, A > 0: not clipped
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_clipped_objective_and_gradient(ratio, advantage, loss, gradient):
    terms, value, slope = one(ratio, advantage)
    assert value == pytest.approx(loss)
    assert slope == pytest.approx(gradient)
    assert bool(terms.clipped_high) == (ratio == 1.5 and advantage > 0)
    assert bool(terms.clipped_low) == (ratio == 0.5 and advantage < 0)


@pytest.mark.parametrize(
    ("mu", "weight"),
    [(-1.0, 1.0), (-1.0 - math.log(1.5), 1.5), (-3.0, 2.0), (0.0, 1 / E), (-1e30, 2.0)],
)
def test_importance_weight_is_capped_above_and_multiplies_loss_and_gradient(mu, weight):
    terms, value, slope = one(1.1, 1.0, mu=mu)
    assert float(terms.importance) == pytest.approx(weight)
    assert value == pytest.approx(-1.1 * weight)
    assert slope == pytest.approx(-1.1 * weight)


def test_the_clip_is_against_the_old_policy_never_the_sampler():
    _, _, slope = one(1.0, 1.0, mu=-1.0 - math.log(1.9))  # π_old is 1.9 times the sampler's: not clipped
    assert slope == pytest.approx(-1.9)


def test_importance_has_no_gradient_on_policy():
    new = torch.tensor([-1.0], requires_grad=True)
    assert not importance(new, torch.tensor([-1.5]), 2.0).requires_grad


def test_kl_to_reference_value_and_gradient():
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    value = kl_to_reference(new, reference)
    assert value.tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, E - 1 - 1])
    value.sum().backward()
    assert new.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - E])


def test_kl_enters_with_its_coefficient_and_the_tokens_weight():
    new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    fixed = torch.tensor([-1.0], dtype=torch.float64)
    terms = policy_loss(
        new,
        fixed,
        fixed,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([0.25], dtype=torch.float64),
        epsilon_low=0.2,
        epsilon_high=0.2,
        cap=2.0,
        reference=torch.tensor([0.0], dtype=torch.float64),
        kl_coefficient=0.4,
    )
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(0.4 * 0.25 * (E - 2))
    assert float(new.grad) == pytest.approx(0.4 * 0.25 * (1 - E))
    assert float(terms.kl) == pytest.approx(E - 2)


def test_kl_of_a_step_is_exact_in_expectation():
    before = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    after = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    values = kl_of_step(after.log(), before.log())
    assert (values >= 0).all()
    assert float((before * values).sum()) == pytest.approx(float((after * (after / before).log()).sum()))
