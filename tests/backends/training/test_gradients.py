"""Loss and gradients of whole batches against a naive computation: one row per call, textbook formulas, autograd."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from art_backends.training import adapters, packing
from art_backends.training.adapters import disabled
from art_backends.training.advantages import plan
from art_backends.training.sequences import build
from art_backends.training.updates import Updates
from art_backends.trajectories import Choice

from tests.backends.training.conftest import (
    common_batch,
    make_call,
    make_group,
    make_request,
    plain_logprobs,
    rich_batch,
)


def loaded(make_trainer, tmp_path, groups, **config):
    """A trainer with a LoRA that is not zero, so that the policy differs from the reference."""
    trainer = make_trainer()
    request = make_request(tmp_path / "versions", groups, **config)
    state = trainer._load(request)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, item in adapters.parameters(state.model).items():
            if "lora_B" in name:
                item.copy_(torch.randn(item.shape, generator=generator) * 0.05)
    return state, request.config


class Frozen:
    """An optimizer's place, keeping the gradients of the update for comparison instead of moving the weights."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.param_groups = [{"lr": 0.0}]
        self.gradients = []

    def zero_grad(self, set_to_none):
        for item in self.parameters.values():
            item.grad = None

    def step(self):
        self.gradients.append({name: item.grad.clone() for name, item in self.parameters.items()})


def packed(state, config, groups, old=None, make=packing.tree_packs):
    """Gradients and metrics as the trainer computes them; ``old`` shifts log π_old of every query."""
    sequences = build(groups)
    batch = plan(sequences, config)
    packs = make(batch.groups, config.pack_tokens)
    parameters = adapters.parameters(state.model)
    frozen = Frozen(parameters)
    updates = Updates(
        forward=state.forward,
        parameters=parameters,
        optimizer=frozen,
        config=config,
        plan=batch,
        packs=packs,
        reference=state.reference,
        progress=lambda _done, _all: None,
        cancelled=lambda: False,
    )
    if old is not None:
        with torch.no_grad():
            updates._old = [
                state.forward.logprobs(pack)
                + torch.tensor([old(int(token)) for token in pack.query_token], dtype=torch.float32)
                for pack in packs
            ]
    measured = updates.run()
    return frozen.gradients[0], measured.metrics, packs


def naive(state, config, groups, old=None):
    """The same, from the design's formulas, call by call."""
    model = state.model
    parameters = adapters.parameters(model)
    for item in parameters.values():
        item.grad = None
    kept = []
    for group in groups:
        rewards = [item.reward for item in group.trajectories]
        if max(rewards) - min(rewards) < 1e-6:
            continue
        average = sum(rewards) / len(rewards)
        deviation = float(np.std(rewards, ddof=1)) + 1e-4 if config.scale_rewards else 1.0
        kept += [(item, (item.reward - average) / deviation) for item in group.trajectories]
    if config.baseline == "leave_one_out":
        others = {  # of each rollout: the mean of the rest of its group
            item.rollout_id: [other.reward for other in group.trajectories if other is not item]
            for group in groups
            for item in group.trajectories
        }
        kept = [(item, item.reward - sum(others[item.rollout_id]) / len(others[item.rollout_id])) for item, _ in kept]
    counts = {
        item.rollout_id: sum(len(choice.token_ids) for call in item.calls for choice in call.choices)
        for item, _ in kept
    }
    total = torch.zeros(())
    for item, advantage in kept:
        for call in item.calls:
            for choice in call.choices:
                new = plain_logprobs(model, call, choice)
                shift = torch.tensor([old(token) if old else 0.0 for token in choice.token_ids])
                before = new.detach() + shift
                ratio = torch.exp((new - before).mean() if config.objective == "gspo" else new - before)
                weight = torch.exp(before - torch.tensor(choice.logprobs))
                if config.importance == "mask":
                    weight = weight * ((weight <= config.importance_cap) & (weight >= config.importance_floor))
                weight = weight.clamp(max=config.importance_cap)
                clipped = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
                terms = -weight * torch.minimum(ratio * advantage, clipped * advantage)
                if config.objective == "cispo":
                    terms = -weight * ratio.clamp(max=1 + config.epsilon_high).detach() * advantage * new
                if config.kl_coefficient:
                    with torch.no_grad(), disabled(model):
                        reference = plain_logprobs(model, call, choice)
                    terms = terms + config.kl_coefficient * (torch.exp(reference - new) - (reference - new) - 1)
                if config.loss_normalization == "batch_tokens":
                    total = total + terms.sum() / sum(counts.values())
                elif config.loss_normalization == "constant":
                    total = total + terms.sum() / (len(kept) * config.normalization_tokens)
                else:
                    total = total + terms.sum() / counts[item.rollout_id] / len(kept)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), config.max_grad_norm)
    gradients = {name: item.grad.clone() for name, item in parameters.items()}
    return gradients, float(total.detach()), float(norm)


def distance(first, second) -> float:
    difference = sum(float(((first[name] - second[name]).double() ** 2).sum()) for name in second)
    return (difference / sum(float((item.double() ** 2).sum()) for item in second.values())) ** 0.5


def shifted(token: int) -> float:
    """log π_old − log π_θ by token: some within the clip, some beyond it on either side."""
    return (-0.5, -0.1, 0.0, 0.1, 0.5)[token % 5]


CASES = {
    "on policy": {},
    "std": {"scale_rewards": True},
    "per rollout": {"loss_normalization": "rollout_tokens"},
    "dr grpo": {"loss_normalization": "constant", "normalization_tokens": 16},
    "rloo": {"baseline": "leave_one_out"},
    "dapo": {"epsilon_high": 0.28, "scale_rewards": True},
    "cispo": {"objective": "cispo", "epsilon_high": 0.3},
    "gspo": {"objective": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.05, "loss_normalization": "rollout_tokens"},
    "masked": {"importance": "mask", "importance_cap": 3.0, "importance_floor": 0.2},
    "kl": {"kl_coefficient": 0.3},
    "everything": {
        "scale_rewards": True,
        "loss_normalization": "rollout_tokens",
        "kl_coefficient": 0.1,
        "epsilon_low": 0.1,
        "epsilon_high": 0.3,
        "importance_cap": 1.2,
        "max_grad_norm": 0.05,
    },
    "checkpointing": {"gradient_checkpointing": True},
    "several packs": {"pack_tokens": 64},
}


@pytest.mark.parametrize("old", [None, shifted], ids=["ratio 1", "ratios beyond the clip"])
@pytest.mark.parametrize("case", list(CASES))
def test_gradients_equal_one_row_per_call(case, old, make_trainer, tmp_path):
    state, config = loaded(make_trainer, tmp_path, rich_batch(), **CASES[case])
    state.use_checkpointing(config.gradient_checkpointing)
    expected, loss, norm = naive(state, config, rich_batch(), old)
    gradients, metrics, _ = packed(state, config, rich_batch(), old)
    assert distance(gradients, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if old is not None:
        assert (metrics["clip_ratio/low_mean"] > 0) == (config.objective != "cispo")
        assert metrics["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize("budget", [12, 16, 24, 1000])
@pytest.mark.parametrize("make", [packing.tree_packs, packing.plain_packs])
def test_however_the_batch_is_cut_the_gradient_is_the_same(budget, make, make_trainer, tmp_path):
    state, config = loaded(make_trainer, tmp_path, rich_batch(), kl_coefficient=0.1)
    whole, metrics, _ = packed(state, config, rich_batch(), shifted)

    def cut(groups, _budget):
        return make(groups, budget)

    gradients, other, packs = packed(state, config, rich_batch(), shifted, cut)
    assert (len(packs) > 1) == (budget < 1000)
    assert distance(gradients, whole) <= 1e-5
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def forked_batch():
    """Forks within forks, segments of one token, answers that are prefixes of others, in one group and across two."""

    def rollout(name, reward, *calls):
        made = [make_call(f"{name}{at}", prompt, sampled, sequence=at) for at, (prompt, sampled) in enumerate(calls)]
        return name, reward, made

    system = list(range(10, 30))
    return [
        make_group(
            "one",
            rollout("a", 1.0, ([*system, 1], [2, 3, 4, 5]), ([*system, 1, 2, 3, 4, 5, 9], [6, 7, 8])),
            rollout("b", 0.0, ([*system, 1], [2, 3]), ([*system, 1, 2, 3, 9], [6])),
            rollout("c", 0.5, ([*system, 1], [2]), ([*system, 1, 2, 3, 4], [5])),
            rollout("d", 0.7, ([*system, 1], [2, 3, 4, 8]), ([*system, 1], [3])),
            rollout("e", 0.1, ([*system, 1], [2, 3, 4, 5]), ([*system, 1, 2, 3, 4, 5, 9], [6, 8])),
        ),
        make_group(
            "two",
            rollout("f", 1.0, ([*system, 1], [2, 3, 4])),
            rollout("g", 0.0, ([*system, 2], [1]), ([*system, 2, 1], [1]), ([*system, 2, 1, 1], [1])),
            rollout("h", 0.0, (system[:1], [11, 12, 14])),
        ),
    ]


@pytest.mark.parametrize("tile", [2, 5, 128])
@pytest.mark.parametrize("budget", [32, 40, 70, 1000])
@pytest.mark.parametrize("batch", [common_batch, forked_batch])
def test_groups_with_a_common_prefix_equal_one_row_per_call(batch, budget, tile, make_trainer, tmp_path):
    state, config = loaded(make_trainer, tmp_path, batch(), kl_coefficient=0.1)
    assert state.forward.tiled
    state.forward.tile = tile
    expected, loss, norm = naive(state, config, batch(), shifted)
    gradients, metrics, packs = packed(
        state, config, batch(), shifted, lambda groups, _budget: packing.tree_packs(groups, budget)
    )
    assert (len(packs) > 1) == (budget < {common_batch: 1000, forked_batch: 40}[batch])
    assert distance(gradients, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_splitting_a_rollout_into_more_calls_changes_nothing(make_trainer, tmp_path):
    prompt, sampled, probs = [1, 2, 3], [4, 5, 6, 7, 8], [-1.0, -2.0, -0.5, -3.0, -1.5]
    rest = ("r2", 0.0, [make_call("b", prompt, [4, 9], [-1.0, -1.0])])
    one = make_group("g", ("r1", 1.0, [make_call("a", prompt, sampled, probs)]), rest)
    parts = [
        make_call(f"a{at}", [*prompt, *sampled[:at]], [sampled[at]], [probs[at]], sequence=at)
        for at in range(len(sampled))
    ]
    many = make_group("g", ("r1", 1.0, parts), rest)
    state, config = loaded(make_trainer, tmp_path, [one])
    for normalization in ("batch_tokens", "rollout_tokens"):
        config = config.model_copy(update={"loss_normalization": normalization})
        first, metrics, _ = packed(state, config, [one])
        second, others, _ = packed(state, config, [many])
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert metrics == others


def test_a_node_sampled_by_several_rollouts_counts_once_for_each(make_trainer, tmp_path):
    def batch(*rewards):
        calls = [make_call(f"c{n}", [1, 2, 3], [4, 5, 6], [-1.0 - n / 10] * 3) for n in range(len(rewards))]
        other = ("z", 0.0, [make_call("z1", [1, 2, 3], [9], [-2.0])])
        return [make_group("g", *((f"r{n}", reward, [calls[n]]) for n, reward in enumerate(rewards)), other)]

    groups = batch(1.0, 0.5, 1.0)
    state, config = loaded(make_trainer, tmp_path, groups)
    expected, loss, _ = naive(state, config, groups)
    gradients, metrics, packs = packed(state, config, groups)
    assert distance(gradients, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert packs[0].tokens == 7  # 3 of the prompt, 3 shared by three rollouts, 1 of the other
    assert len(packs[0].query_at) == 4
    assert len(packs[0].occurrence_query) == 10


def test_input_order_does_not_change_a_byte_of_the_gradient(make_trainer, tmp_path):
    groups = rich_batch()
    turned = [group.model_copy(update={"trajectories": group.trajectories[::-1]}) for group in copy.copy(groups)[::-1]]
    state, config = loaded(make_trainer, tmp_path, groups)
    first, _, _ = packed(state, config, groups)
    second, _, _ = packed(state, config, turned)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tokens_left_out_do_not_enter_the_gradient(make_trainer, tmp_path):
    """A drifted prompt holds other tokens than were sampled: only what the second call sampled trains."""
    first = make_call("a1", [1, 2], [3, 4], [-1.0, -1.0])
    drifted = make_call("a2", [1, 2, 3, 9, 5], [6], [-1.0], sequence=1)
    bad = make_call("a3", [1, 2], [7], [float("nan")], sequence=2)
    other = ("b", 0.0, [make_call("b1", [1, 2], [8], [-1.0])])
    with_bad = [make_group("g", ("a", 1.0, [first, drifted, bad]), other)]
    without = [make_group("g", ("a", 1.0, [first, drifted]), other)]
    state, config = loaded(make_trainer, tmp_path, without)
    expected, _, _ = naive(state, config, without)
    gradients, _, packs = packed(state, config, with_bad)
    assert distance(gradients, expected) <= 1e-5
    asked = {int(token) for pack in packs for token in pack.query_token}
    assert asked == {3, 4, 6, 8}


def test_old_logprobs_are_measured_once_before_the_first_of_several_updates(make_trainer, tmp_path):
    """Two updates: the second one's ratio is against the weights before the first."""
    groups = rich_batch()
    trainer = make_trainer()
    request = make_request(tmp_path / "versions", groups, updates_per_batch=2, learning_rate=0.02, max_grad_norm=10.0)
    state = trainer._load(request)
    parameters = adapters.parameters(state.model)
    begin = {name: item.detach().clone() for name, item in parameters.items()}
    trainer.step(request)
    trained = {name: item.detach().clone() for name, item in parameters.items()}

    with torch.no_grad():
        for name, item in parameters.items():
            item.copy_(begin[name])
    calls = [(call, choice) for group in groups for item in group.trajectories for call in item.calls
             for choice in call.choices]  # fmt: skip
    with torch.no_grad():
        before = {(call.id, choice.index): plain_logprobs(state.model, call, choice) for call, choice in calls}
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.02, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        old_naive(state, request.config, groups, before).backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 10.0)
        optimizer.step()
    moved = sum(float(((trained[name] - begin[name]) ** 2).sum()) for name in begin) ** 0.5
    apart = sum(float(((trained[name] - parameters[name].detach()) ** 2).sum()) for name in begin) ** 0.5
    assert moved > 0.1
    assert apart / moved < 1e-3


def old_naive(state, config, groups, before) -> torch.Tensor:
    total, count = torch.zeros(()), 0
    for group in groups:
        rewards = [item.reward for item in group.trajectories]
        if max(rewards) == min(rewards):
            continue
        for item in group.trajectories:
            advantage = item.reward - sum(rewards) / len(rewards)
            for call in item.calls:
                for choice in call.choices:
                    old = before[call.id, choice.index]
                    ratio = torch.exp(plain_logprobs(state.model, call, choice) - old)
                    weight = torch.exp(old - torch.tensor(choice.logprobs)).clamp(max=2.0)
                    bounded = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
                    total = total - (weight * torch.minimum(ratio * advantage, bounded * advantage)).sum()
                    count += len(choice.token_ids)
    return total / count


def test_choices_are_branches_of_their_own():
    (group,) = build([rich_batch()[0]])
    found = {(s.call_id, s.choice): s.tokens[s.start :].tolist() for s in group.samples if s.call_id == "c1"}
    assert found == {("c1", 0): [8, 17], ("c1", 1): [8, 9, 18]}
    assert Choice().index == 0
