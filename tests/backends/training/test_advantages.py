from __future__ import annotations

import pytest
from art_backends.training.advantages import group_advantages, plan
from art_backends.training.sequences import build

from tests.backends.training.conftest import make_call, make_group


def test_reward_minus_the_mean_of_the_group():
    assert group_advantages({"a": 1.0, "b": 0.0, "c": 0.5}, scale=False) == {"a": 0.5, "b": -0.5, "c": 0.0}


def test_divided_by_the_standard_deviation():
    values = group_advantages({"a": 1.0, "b": 0.0}, scale=True)
    assert values is not None
    assert values["a"] == pytest.approx(0.5 / (0.5**0.5 + 1e-4))  # std of (1, 0) with n - 1: 0.7071…
    assert values["b"] == -values["a"]


@pytest.mark.parametrize("rewards", [{}, {"a": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0 + 9e-7}])
def test_no_spread(rewards):
    assert group_advantages(rewards, scale=False) is None
    assert group_advantages(rewards, scale=True) is None


def test_a_small_spread_counts():
    assert group_advantages({"a": 1.0, "b": 1.0 + 2e-6}, scale=False) is not None


def batch():
    return build(
        [
            make_group(
                "g",
                ("a", 1.0, [make_call("a1", [1], [2, 3]), make_call("a2", [1, 2, 3, 4], [5], sequence=1)]),
                ("b", 0.0, [make_call("b1", [1], [2])]),
                ("c", 0.5, [make_call("c1", [1], [2], excluded="retry")]),
            ),
            make_group("flat", ("d", 1.0, [make_call("d1", [1], [2])]), ("e", 1.0, [])),
        ]
    )


def test_one_constant_for_all_trained_tokens_of_the_batch():
    result = plan(batch(), scale=False, normalization="batch_tokens")
    assert result.tokens == 4
    assert result.weight == {"a": 0.25, "b": 0.25}
    assert result.advantage == {"a": 0.5, "b": -0.5, "c": 0.0}
    assert [group.name for group in result.groups] == ["g"]


def test_per_rollout_then_over_rollouts():
    result = plan(batch(), scale=False, normalization="rollout_tokens")
    assert result.weight == {"a": pytest.approx(1 / 6), "b": pytest.approx(1 / 2)}
    assert sum(result.weight[rollout] * count for rollout, count in result.trained.items()) == pytest.approx(1)


def test_nothing_to_learn():
    assert plan(batch()[1:], scale=False, normalization="batch_tokens").tokens == 0
