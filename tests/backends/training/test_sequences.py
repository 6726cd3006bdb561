from __future__ import annotations

import math

import numpy as np
import pytest
from art_backends.errors import TrainingError
from art_backends.exclusion import exclusion
from art_backends.training.sequences import branches, build, distinct_tokens, follows
from art_backends.trajectories import CallStatus, CaptureLevel, Node, Sampling

from tests.backends.training.conftest import make_call, make_group, rich_batch


def samples(*calls):
    (group,) = build([make_group("g", ("r", 1.0, calls))])
    return group.samples


def test_a_call_whose_prompt_begins_with_prompt_and_answer_continues_the_branch():
    first = make_call("a", [1, 2], [3, 4])
    second = make_call("b", [1, 2, 3, 4, 9], [5], sequence=1)
    (branch,) = branches(samples(second, first))
    assert [sample.call_id for sample in branch] == ["a", "b"]
    assert [sample.trained for sample in branch] == [2, 1]


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 4, 9],  # a template that dropped what the model reasoned
        [1, 2, 3, 7, 9],  # the answer re-tokenised
        [1, 2, 3],  # a part of the answer only
        [8, 1, 2, 3, 4, 9],  # another system prompt
    ],
)
def test_a_prompt_that_drifted_starts_a_branch_and_trains_only_what_it_sampled(prompt):
    drifted = make_call("b", prompt, [5, 6], sequence=1)
    found = branches(samples(make_call("a", [1, 2], [3, 4]), drifted))
    assert len(found) == 2
    for branch in found:
        for sample in branch:
            source = {"a": ([1, 2], [3, 4]), "b": (prompt, [5, 6])}[sample.call_id]
            assert sample.tokens.tolist() == [*source[0], *source[1]]
            assert sample.tokens[sample.start :].tolist() == source[1]


def test_two_continuations_of_one_answer_share_it_and_it_stands_in_one_branch():
    found = branches(
        samples(
            make_call("a", [1], [2]),
            make_call("b", [1, 2, 3], [4], sequence=1),
            make_call("c", [1, 2, 5], [6], sequence=2),
        )
    )
    assert [[sample.call_id for sample in branch] for branch in found] == [["a", "b"], ["c"]]


def test_follows_compares_whole_ids_not_bytes():
    long, short = samples(make_call("a", [1], [256]), make_call("b", [1], [1]))[::-1]
    assert not follows(long, short)


def test_equal_answers_of_one_rollout_are_both_kept():
    assert len(samples(make_call("a", [1], [2]), make_call("b", [1], [2], sequence=1))) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": CallStatus.ERROR}, "error"),
        ({"status": CallStatus.CANCELLED}, "cancelled"),
        ({"status": CallStatus.OPEN}, "open"),
        ({"excluded": "retry"}, "retry"),
        ({"capture": CaptureLevel.IDS}, "capture"),
        ({"capture": CaptureLevel.TEXT}, "capture"),
        ({"sampling": Sampling(constrained=True)}, "constrained"),
        ({"sampling": Sampling(top_p=0.9)}, "truncated_sampling"),
        ({"sampling": Sampling(top_k=20)}, "truncated_sampling"),
        ({"sampling": Sampling(temperature=0.0)}, "greedy"),
        ({"logprobs": [-1.0]}, "logprob_mismatch"),
        ({"logprobs": [-1.0, math.nan]}, "logprob_not_finite"),
        ({"logprobs": [-math.inf, -1.0]}, "logprob_not_finite"),
        ({"sampled": [], "logprobs": []}, "empty"),
        ({"prompt": []}, "no_prompt"),
        ({"sampled": [3, 61]}, "unknown_token"),
        ({"prompt": [-1, 2]}, "unknown_token"),
        ({"sampling": Sampling(temperature=0.5)}, None),
    ],
)
def test_what_is_left_out_and_why(changes, reason):
    call = make_call("a", **{"prompt": [1, 2], "sampled": [3, 4], **changes})
    assert exclusion(call, call.choices[0], 61) == reason
    (group,) = build([make_group("g", ("r", 1.0, [call]))], vocabulary=61)
    assert [answer.reason for answer in group.answers] == [reason]
    assert len(group.samples) == (reason is None)


@pytest.mark.parametrize(
    ("nodes", "trained"),
    [
        ([], "abcd"),
        (["agent"], "a"),
        (["team"], "bc"),
        (["writer"], "bd"),
        (["team/writer"], "b"),
        (["researcher"], "c"),
        (["agent", "critic"], "ac"),
        (["nobody"], ""),
    ],
)
def test_only_chosen_nodes_train_and_the_rest_is_context(nodes, trained):
    places = {
        "a": Node(name="agent", checkpoint_ns="agent:1"),
        "b": Node(name="writer", checkpoint_ns="team:2|writer:3"),
        "c": Node(name="critic", checkpoint_ns="team:2|critic:4", agent="researcher"),
        "d": Node(name="writer"),
    }
    calls = [
        make_call(name, [1] * (at + 1), [2], sequence=at, node=node) for at, (name, node) in enumerate(places.items())
    ]
    (group,) = build([make_group("g", ("r", 1.0, calls))], nodes=nodes)
    assert "".join(answer.call_id for answer in group.answers if answer.sample is not None) == trained
    assert {answer.reason for answer in group.answers if answer.sample is None} <= {"other_node"}


def test_an_answer_left_out_is_still_context():
    left_out = make_call("a", [1], [2, 3], excluded="retry")
    (sample,) = samples(left_out, make_call("b", [1, 2, 3, 4], [5], sequence=1))
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5]
    assert sample.start == 4


def test_a_call_without_an_answer_is_reported():
    (group,) = build([make_group("g", ("r", 1.0, [make_call("a", [1], [2]).model_copy(update={"choices": []})]))])
    assert [(answer.call_id, answer.reason) for answer in group.answers] == [("a", "empty")]


def test_a_reward_that_is_not_finite_takes_the_rollout_out():
    (group,) = build([make_group("g", ("r", math.nan, [make_call("a", [1], [2])]), ("s", 1.0, []))])
    assert group.rewards == {"s": 1.0}
    assert group.unusable == ("r",)
    assert [answer.reason for answer in group.answers] == ["reward_not_finite"]


def test_the_order_of_arrival_does_not_matter():
    batch = rich_batch()
    shuffled = [
        group.model_copy(update={"trajectories": list(reversed(group.trajectories))}) for group in reversed(batch)
    ]
    keys = [[(s.rollout_id, s.call_id, s.choice) for s in group.samples] for group in build(batch)]
    assert keys == [[(s.rollout_id, s.call_id, s.choice) for s in group.samples] for group in build(shuffled)]


def test_a_rollout_given_twice_is_refused():
    with pytest.raises(TrainingError, match="r occurs twice"):
        build([make_group("g", ("r", 1.0, [])), make_group("h", ("r", 0.0, []))])


def test_distinct_tokens_counts_the_nodes_of_the_tree():
    for group in build(rich_batch()):
        prefixes = {tuple(s.tokens[:size].tolist()) for s in group.samples for size in range(1, len(s.tokens) + 1)}
        assert distinct_tokens(group.samples) == len(prefixes)
        assert all(np.isfinite(sample.logprobs).all() for sample in group.samples)
