from __future__ import annotations

from dataclasses import replace

import pytest
from art_backends.config import TrainConfig
from art_backends.training.advantages import group_advantages, imitation, plan
from art_backends.training.sequences import build

from tests.backends.training.conftest import make_call, make_group


def test_reward_minus_the_mean_of_the_group():
    assert group_advantages({"a": 1.0, "b": 0.0, "c": 0.5}, scale=False) == {"a": 0.5, "b": -0.5, "c": 0.0}


def test_divided_by_the_standard_deviation():
    values = group_advantages({"a": 1.0, "b": 0.0}, scale=True)
    assert values is not None
    assert values["a"] == pytest.approx(0.5 / (0.5**0.5 + 1e-4))  # std of (1, 0) with n - 1: 0.7071…
    assert values["b"] == -values["a"]


def test_minus_the_mean_of_the_others():
    values = group_advantages({"a": 1.0, "b": 0.0, "c": 0.5}, scale=False, baseline="leave_one_out")
    assert values == pytest.approx({"a": 1.0 - 0.25, "b": 0.0 - 0.75, "c": 0.5 - 0.5})


def test_one_outlier_among_equals_is_measured_against_the_others():
    values = group_advantages({"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}, scale=False, baseline="leave_one_out")
    assert values == pytest.approx({"a": 1.0, "b": -1 / 3, "c": -1 / 3, "d": -1 / 3})


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
    result = plan(batch(), TrainConfig())
    assert result.tokens == 4
    assert result.weight == {"a": 0.25, "b": 0.25}
    assert result.advantage == {"a": 0.5, "b": -0.5, "c": 0.0}
    assert [group.name for group in result.groups] == ["g"]


def test_per_rollout_then_over_rollouts():
    result = plan(batch(), TrainConfig(loss_normalization="rollout_tokens"))
    assert result.weight == {"a": pytest.approx(1 / 6), "b": pytest.approx(1 / 2)}
    assert sum(result.weight[rollout] * count for rollout, count in result.trained.items()) == pytest.approx(1)


def test_nothing_to_learn():
    assert plan(batch()[1:], TrainConfig()).tokens == 0


def test_by_rollouts_times_a_constant():
    result = plan(batch(), TrainConfig(loss_normalization="constant", normalization_tokens=10))
    assert result.weight == {"a": pytest.approx(1 / 20), "b": pytest.approx(1 / 20)}  # two rollouts have tokens


def nodes_batch(same: float = 1.0):
    """Two rollouts, equal as wholes if ``same`` is 1; the planner of one was better."""
    planner, writer = {"name": "planner"}, {"name": "writer"}
    rollouts = [
        (
            name,
            reward,
            [
                make_call(f"{name}1", [1], [2, 3], node=planner),
                make_call(f"{name}2", [1, 4], [5], sequence=1, node=writer),
                make_call(f"{name}3", [1, 5], [6], sequence=2),
            ],
        )
        for name, reward in (("a", 1.0), ("b", same))
    ]
    group = make_group("g", *rollouts)
    first, second = group.trajectories
    return build(
        [
            group.model_copy(
                update={
                    "trajectories": [
                        first.model_copy(update={"node_rewards": {"planner": 0.2}}),
                        second.model_copy(update={"node_rewards": {"planner": 0.8}}),
                    ]
                }
            )
        ]
    )


@pytest.mark.parametrize(("other", "whole"), [(1.0, 0.0), (0.5, 0.25)])
def test_calls_of_a_node_with_rewards_of_its_own_have_its_advantage(other, whole):
    (group,) = nodes_batch(other)
    result = plan([group], TrainConfig())
    found = {sample.call_id: result.of(sample) for sample in group.samples}
    assert found == pytest.approx({"a1": -0.3, "b1": 0.3, "a2": whole, "a3": whole, "b2": -whole, "b3": -whole})
    assert result.tokens == 8


def test_a_node_whose_rewards_are_equal_learns_nothing():
    (group,) = nodes_batch(0.5)
    equal = {node: dict.fromkeys(rewards, 0.4) for node, rewards in group.node_rewards.items()}
    result = plan([replace(group, node_rewards=equal)], TrainConfig())
    assert {result.of(sample) for sample in group.samples if sample.node == "planner"} == {0.0}
    assert plan([replace(group, node_rewards=equal, rewards={"a": 1.0, "b": 1.0})], TrainConfig()).tokens == 0


def test_imitation_takes_every_answer_for_the_same():
    result = imitation(batch())  # "flat" has no spread, and d trains all the same
    assert set(result.advantage.values()) == {1.0}
    assert result.trained == {"a": 3, "b": 1, "d": 1}
    assert result.weight == {"a": 0.2, "b": 0.2, "d": 0.2}
