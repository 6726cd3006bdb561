from __future__ import annotations

import math

import pytest
import torch
from art_backends.config import TrainConfig
from art_backends.training.losses import Tokens, importance, kl_of_step, kl_to_reference, policy_loss

E = math.exp(1)


def vector(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def several(ratios, advantages, *, answer=None, mu=None, weights=None, reference=None, **settings):
    """Terms and gradient of tokens with log π_old = −1, all of one answer unless ``answer`` says which."""
    new = vector(*(-1.0 + math.log(ratio) for ratio in ratios), grad=True)
    tokens = Tokens(
        new=new,
        old=vector(*[-1.0] * len(ratios)),
        sampled=vector(*(mu or [-1.0] * len(ratios))),
        advantage=vector(*advantages),
        weight=vector(*(weights or [1.0] * len(ratios))),
        answer=torch.tensor(answer or [0] * len(ratios)),
        reference=None if reference is None else vector(*reference),
    )
    terms = policy_loss(tokens, TrainConfig(**{"epsilon_low": 0.2, "epsilon_high": 0.3, **settings}))
    terms.loss.backward()
    return terms, new.grad.tolist()


def one(ratio: float, advantage: float, *, mu: float = -1.0, **settings):
    """Terms, loss and gradient of a single token with weight 1."""
    terms, (slope,) = several([ratio], [advantage], mu=[mu], **settings)
    return terms, float(terms.loss.detach()), slope


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
    assert not importance(new, torch.tensor([-1.5]), TrainConfig()).requires_grad


def test_kl_to_reference_value_and_gradient():
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    value = kl_to_reference(new, reference)
    assert value.tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, E - 1 - 1])
    value.sum().backward()
    assert new.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - E])


def test_kl_enters_with_its_coefficient_and_the_tokens_weight():
    terms, (slope,) = several([1.0], [0.0], weights=[0.25], reference=[0.0], kl_coefficient=0.4)
    assert float(terms.loss.detach()) == pytest.approx(0.4 * 0.25 * (E - 2))
    assert slope == pytest.approx(0.4 * 0.25 * (1 - E))
    assert float(terms.kl) == pytest.approx(E - 2)


def test_k1_is_taken_off_what_the_token_earned():
    terms, (slope,) = several([1.1], [2.0], weights=[0.5], reference=[-1.5], kl_coefficient=0.4, kl_estimator="k1")
    earned = 2.0 - 0.4 * (-1.0 + 1.5)  # log π_old − log π_ref, of the policy that sampled, without gradient
    assert float(terms.loss.detach()) == pytest.approx(-0.5 * 1.1 * earned)
    assert slope == pytest.approx(-0.5 * 1.1 * earned)
    assert float(terms.kl) == pytest.approx(0.5)


def test_k1_has_the_gradient_of_the_kl_in_expectation():
    """Over all tokens of a small vocabulary: the sum of p · ∇(what k1 adds) is ∇ KL."""
    logits = vector(0.3, -0.7, 1.1, grad=True)
    reference = torch.log_softmax(vector(-0.2, 0.4, 0.1), 0)
    new = torch.log_softmax(logits, 0)
    (new.exp() * (new - reference)).sum().backward()
    expected = logits.grad.tolist()
    logits.grad = None
    new = torch.log_softmax(logits, 0)
    tokens = Tokens(new, new.detach(), new.detach(), torch.zeros(3), new.detach().exp(), torch.arange(3), reference)
    policy_loss(tokens, TrainConfig(kl_coefficient=1.0, kl_estimator="k1")).loss.backward()
    assert logits.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "floor", "weight"), [(1.0, 0.0, 1.0), (1.9, 0.5, 1.9), (2.1, 0.5, 0.0), (0.4, 0.5, 0.0), (0.4, 0.0, 0.4)]
)
def test_masked_importance_drops_what_lies_outside(ratio, floor, weight):
    terms, _, slope = one(1.0, 1.0, mu=-1.0 - math.log(ratio), importance="mask", importance_floor=floor)
    assert float(terms.importance) == pytest.approx(weight)
    assert slope == pytest.approx(-weight)


def test_importance_can_be_switched_off():
    terms, _, slope = one(1.0, 1.0, mu=-3.0, importance="off")
    assert float(terms.importance) == 1.0
    assert slope == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [(1.0, 2.0, -2.0), (1.2, 2.0, -2.4), (1.5, 2.0, -2.6), (1.5, -2.0, 2.6), (0.5, -2.0, 1.0), (0.5, 2.0, -1.0)],
)
def test_cispo_bounds_the_weight_and_keeps_every_tokens_gradient(ratio, advantage, slope):
    terms, value, gradient = one(ratio, advantage, objective="cispo")
    assert gradient == pytest.approx(slope)
    assert value == pytest.approx(slope * (-1.0 + math.log(ratio)))
    assert bool(terms.clipped_high) == (ratio > 1.3)
    assert not bool(terms.clipped_low)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_reinforce_knows_no_clip(ratio):
    terms, value, slope = one(ratio, 2.0, objective="reinforce")
    assert slope == pytest.approx(-2.0)
    assert value == pytest.approx(-2.0 * (-1.0 + math.log(ratio)))
    assert not bool(terms.clipped_high)
    assert not bool(terms.clipped_low)


def test_gspo_has_one_ratio_per_answer():
    ratios, advantages = [1.1, 1.2, 0.9], [2.0, 2.0, -1.0]
    terms, slopes = several(ratios, advantages, answer=[0, 0, 1], objective="gspo")
    first = (1.1 * 1.2) ** 0.5
    assert terms.ratio.tolist() == pytest.approx([first, first, 0.9])
    assert float(terms.loss.detach()) == pytest.approx(-(2 * first * 2.0 - 0.9))
    assert slopes == pytest.approx([-first * 2.0, -first * 2.0, 0.9])  # 2 tokens, each with half of s' gradient


def test_gspo_clips_the_whole_answer():
    # one token is far out, one is not; their geometric mean is 1.5
    terms, slopes = several([1.0, 2.25], [1.0, 1.0], objective="gspo")
    assert slopes == pytest.approx([0.0, 0.0])
    assert terms.clipped_high.tolist() == [True, True]
    assert several([1.0, 2.25], [1.0, 1.0])[1] == pytest.approx([-1.0, 0.0])  # PPO's clip: the one token


def test_gspo_token_equals_gspo_where_all_tokens_have_one_advantage():
    ratios, answer = [1.1, 1.2, 0.9, 0.7], [0, 0, 1, 1]
    whole, slopes = several(ratios, [2.0, 2.0, -1.0, -1.0], answer=answer, objective="gspo")
    single, others = several(ratios, [2.0, 2.0, -1.0, -1.0], answer=answer, objective="gspo_token")
    assert others == pytest.approx(slopes)
    assert float(single.loss.detach()) == pytest.approx(float(whole.loss.detach()))


def test_gspo_token_lets_each_token_have_its_own_advantage():
    _, slopes = several([1.1, 1.2], [2.0, -1.0], objective="gspo_token")
    ratio = (1.1 * 1.2) ** 0.5
    assert slopes == pytest.approx([-2.0 * ratio, 1.0 * ratio])


def test_kl_of_a_step_is_exact_in_expectation():
    before = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    after = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    values = kl_of_step(after.log(), before.log())
    assert (values >= 0).all()
    assert float((before * values).sum()) == pytest.approx(float((after * (after / before).log()).sum()))
