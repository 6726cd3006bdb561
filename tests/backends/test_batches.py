"""Which rollouts a step plays, and what replaces groups without a spread."""

import pytest
from art_backends.batches import Batch, spread_groups
from art_backends.config import TrainConfig
from art_backends.scenarios import Scenario
from art_backends.trajectories import Purpose, Rollout

SCENARIOS = [Scenario(f"s{number}", {"n": number}) for number in range(6)]


def settings(**changes) -> TrainConfig:
    return TrainConfig(**{"groups_per_step": 2, "group_size": 2, "shuffle": False, **changes})


def played(slots, rewards, **changes) -> list[Rollout]:
    """Rollouts of the slots, with the rewards of their groups in turn."""
    groups = list(dict.fromkeys(slot.group for slot in slots))
    return [
        Rollout(
            id=f"{slot.group}.{slot.sample}", policy="p", version="p@0", group=slot.group, sample=slot.sample,
            closed=True, reward=rewards[groups.index(slot.group)][slot.sample], **changes,
        )
        for slot in slots
    ]  # fmt: skip


def groups(slots) -> list[str]:
    return list(dict.fromkeys(slot.group for slot in slots))


def test_a_step_has_its_groups_and_their_samples():
    slots = Batch(settings(), SCENARIOS, 2, 5).first()
    assert [(slot.group, slot.sample) for slot in slots] == [("s2", 0), ("s2", 1), ("s3", 0), ("s3", 1)]
    assert {(slot.purpose, slot.step, slot.version) for slot in slots} == {(Purpose.TRAIN, 2, 5)}


def test_a_scenario_that_comes_twice_is_two_groups():
    assert groups(Batch(settings(groups_per_step=3), SCENARIOS[:2], 1, 0).first()) == ["s0", "s1", "s0#2"]


def test_nothing_is_replaced_unless_asked_for():
    batch = Batch(settings(), SCENARIOS, 1, 0)
    assert batch.more(played(batch.first(), [[0, 0], [1, 1]])) == []


def test_a_group_without_a_spread_is_replaced_until_there_are_enough():
    batch = Batch(settings(dynamic_sampling=5), SCENARIOS, 1, 0)
    rollouts = played(batch.first(), [[0, 1], [1, 1]])
    second = batch.more(rollouts)
    assert len(groups(second)) == 1
    rollouts += played(second, [[0, 0]])
    third = batch.more(rollouts)
    assert len(groups(third)) == 1
    assert not {slot.group for slot in third} & {rollout.group for rollout in rollouts}
    assert batch.more(rollouts + played(third, [[0, 1]])) == []


def test_no_more_than_allowed_are_drawn():
    batch = Batch(settings(dynamic_sampling=3), SCENARIOS, 1, 0)
    rollouts = played(batch.first(), [[0, 0]] * 2)
    drawn = []
    while more := batch.more(rollouts):
        drawn += groups(more)
        rollouts += played(more, [[1, 1]] * 2)
    assert len(drawn) == len(set(drawn)) == 3


def test_the_same_rewards_give_the_same_groups():
    def whole():
        batch = Batch(settings(dynamic_sampling=2), SCENARIOS, 4, 0)
        first = batch.first()
        return groups(first) + groups(batch.more(played(first, [[0, 0]] * 2)))

    assert whole() == whole()
    assert len(whole()) == 4


@pytest.mark.parametrize(
    ("metrics", "learnable"),
    [([{}, {}], False), ([{"node/a": 0.1}, {"node/a": 0.2}], True), ([{"other": 0.1}, {"other": 0.2}], False)],
)
def test_a_spread_among_a_nodes_rewards_counts(metrics, learnable):
    slots = Batch(settings(groups_per_step=1), SCENARIOS, 1, 0).first()
    rollouts = [
        rollout.model_copy(update={"metrics": parts})
        for rollout, parts in zip(played(slots, [[1, 1]]), metrics, strict=True)
    ]
    assert spread_groups(rollouts) == {"s0": learnable}


def test_rollouts_with_a_fault_do_not_count():
    slots = Batch(settings(groups_per_step=1), SCENARIOS, 1, 0).first()
    assert spread_groups(played(slots, [[0, 1]], fault="engine")) == {}
