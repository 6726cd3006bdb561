import pytest
from art_backends.report import Evaluation, Report
from art_backends.summary import (
    by_step,
    common_error,
    evaluation,
    evaluation_row,
    evaluations,
    examples,
    fill,
    parted,
    reached,
    step_row,
    successes,
)
from art_backends.trajectories import Rollout, RolloutError


def a_rollout(reward=0.5, *, fault=None, error=None, group="g", output=None, **metrics):
    return Rollout(
        id="r",
        policy="policy",
        version="policy@0",
        closed=True,
        group=group,
        scenario={"q": group},
        output=output,
        reward=None if fault else reward,
        fault=fault,
        error=None if error is None else RolloutError(type="ValueError", message=error),
        metrics=metrics,
    )


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        ([], None),
        ([a_rollout(fault="engine: away")], None),
        ([a_rollout(0.3, success=1.0), a_rollout(0.3, success=0.0)], [1.0, 0.0]),
        ([a_rollout(1.0, success=0.0), a_rollout(fault="reward: raised")], [0.0]),
        ([a_rollout(1.0), a_rollout(0.0)], [1.0, 0.0]),  # rewards that are all 0 or 1 are a success themselves
        ([a_rollout(0.5), a_rollout(1.0)], None),
        ([a_rollout(0.5, success=1.0), a_rollout(0.5)], None),  # named by some only
    ],
)
def test_successes(rollouts, expected):
    assert successes(rollouts) == expected


def test_a_step_in_figures():
    rollouts = [a_rollout(0.0, style=0.5), a_rollout(1.0, style=1.0, error="oh"), a_rollout(fault="engine: away")]
    rollouts[0] = rollouts[0].model_copy(update={"version": "policy@1"})  # version 3 was made from version 2
    outcome = {"kind": "committed", "version": 3, "reason": None, "metrics": {"loss": 0.1, "kl": None, "reward": 9.0}}
    outcome["excluded"] = {"a": "stale", "b": "no_reward"}
    row = step_row(2, rollouts, outcome)
    assert row == {
        "staleness/mean": 1.5, "staleness/max": 2, "stale": 1,
        "step": 2, "outcome": "committed", "version": 3, "loss": 0.1, "rollouts": 3, "errors": 1, "faults": 1,
        "reward": 0.5, "reward_std": 0.5, "success": 0.5, "rewards": "0 ×1, 1 ×1", "reward/style": 0.75,
    }  # fmt: skip


def test_a_step_of_faults_only_has_no_figures():
    row = step_row(1, [a_rollout(fault="engine: away")], {"kind": "skipped", "version": 0, "reason": "none left"})
    assert (row["reward"], row["success"], row["faults"], row["reason"]) == (None, None, 1, "none left")


def test_rows_by_step():
    rows = [
        {"evaluation": 0},
        {"step": 2, "outcome": "committed", "version": 2, "reward": 0.1},
        {"step": 1, "outcome": "committed", "version": 1},
        {"step": 2, "outcome": "committed", "version": 2, "reward": 0.2},
        {"step": 3, "outcome": "committed", "version": 3},
        {"interrupted": 4, "seconds": 1.0},
    ]
    found = by_step(rows, 2)
    assert list(found) == [1, 2]
    assert found[2]["reward"] == 0.2


@pytest.mark.parametrize(
    ("values", "target", "steps", "expected"),
    [
        ([0.9, 0.9], 0.9, 2, True),
        ([0.9, 0.8, 0.9], 0.9, 2, False),
        ([0.1, 0.75, 1.0], 0.875, 2, True),
        ([1.0, 1.0, 0.7], 0.9, 2, False),
        ([0.9], 0.9, 2, False),
        ([None, None], 0.0, 2, False),
        ([None, 1.0], 0.5, 2, False),
        ([1.0, 1.0], None, 2, False),
    ],
)
def test_a_target_must_be_reached_by_the_mean_of_the_last_steps(values, target, steps, expected):
    assert reached([{"success": value} for value in values], target, steps) is expected


def test_an_evaluation_counts_faults_beside_its_means():
    passed = evaluation(4, "policy@4", [a_rollout(1.0), a_rollout(0.0, error="x"), a_rollout(fault="engine: away")])
    assert (passed.scenarios, passed.reward, passed.success, passed.errors, passed.faults) == (2, 0.5, 0.5, 1, 1)


def test_examples_show_the_largest_changes_first():
    before = [a_rollout(0.0, group="a", output="A"), a_rollout(0.5, group="b"), a_rollout(1.0, group="c")]
    after = [a_rollout(0.2, group="a", output="A2"), a_rollout(0.5, group="b"), a_rollout(0.0, group="c", error="oh")]
    found = examples([*before, a_rollout(fault="gone", group="d")], [*after, a_rollout(1.0, group="d")], limit=2)
    assert [item.scenario["q"] for item in found] == ["c", "a"]
    assert found[0].after_error == "ValueError: oh"
    assert (found[1].before, found[1].after) == ("A", "A2")


def test_the_most_frequent_error():
    assert common_error([a_rollout()]) is None
    assert common_error([a_rollout(error="a"), a_rollout(error="b"), a_rollout(error="b")]) == "ValueError: b (×2)"
    assert common_error([a_rollout(error="too deep.\nFor help, visit …"), a_rollout()]) == "ValueError: too deep. (×1)"
    assert common_error([a_rollout(error=" \n")]) == "ValueError (×1)"


def test_totals_are_weighted_by_tokens():
    def row(step, tokens, difference, **more):
        return {
            "step": step, "outcome": "committed", "rollouts": 4, "errors": 1, "faults": 0, "tokens/trained": tokens,
            "tokens/computed": 3 * tokens, "tokens/unique": 2 * tokens,
            "sampling/sampling_logp_difference/mean": difference,
            "sampling/sampling_logp_difference/max": difference * 2,
            "seconds": 2.0, "engine/tokens_sampled": 100.0, "engine/busy_seconds": 4.0, **more,
        }  # fmt: skip

    rows = [row(1, 10, 1.0), row(2, 30, 2.0)]
    report = Report("policy", "base")
    fill(report, rows, [*rows, {"interrupted": 3, "seconds": 5.0}], [a_rollout(0.0)], [a_rollout(1.0), a_rollout(0.0)])
    assert report.mean_abs_logprob_difference == pytest.approx(1.75)
    assert report.max_abs_logprob_difference == 4.0
    assert report.computed_to_unique_tokens == pytest.approx(1.5)
    assert report.engine_tokens_per_second == pytest.approx(25.0)
    assert report.train_seconds == 9.0
    assert (report.rollouts, report.errors, report.trained_tokens, report.held_out) == (8, 2, 40, 2)
    assert (report.base_success, report.trained_success) == (0.0, 0.5)


def test_totals_of_nothing_are_not_made_up():
    report = Report("policy", "base")
    fill(report, [], [], [], [])
    assert report.engine_tokens_per_second is None
    assert report.mean_abs_logprob_difference is None
    assert report.confidence_interval is None


def held(*rewards, every=4):
    return [Evaluation(at * every, f"policy@{at * every}", 50, reward, None) for at, reward in enumerate(rewards)]


def sampled(*rewards, std=0.3):
    return [{"step": at, "reward": reward, "reward_std": std, "rollouts": 32} for at, reward in enumerate(rewards, 1)]


RISING = [0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]


@pytest.mark.parametrize(
    ("passed", "rows", "alarm"),
    [
        (held(0.2, 0.5, 0.4, 0.3), sampled(*RISING), "from 0.575 to 0.925 since policy@4"),
        (held(0.5, 0.4), sampled(*RISING[:4]), "from 0.200 to 0.500 since policy@0"),  # before and after
        (held(0.2, 0.5, 0.4), sampled(*RISING[:8]), None),  # one worse evaluation is no trend
        (held(0.2, 0.5, 0.6, 0.7), sampled(*RISING), None),  # both rise
        (held(0.2, 0.5, 0.4, 0.3), sampled(*[0.5] * 12), None),  # neither rises
        (held(0.2, 0.5, 0.4, 0.3), sampled(*[0.5] * 11, 0.55), None),  # a rise that is within the noise
        (held(0.2, None, None, None), sampled(*RISING), None),
        (held(0.5), [], None),
        (held(0.5, 0.4), sampled(0.2), None),
    ],
)
def test_the_alarm_when_held_out_and_sampled_reward_part(passed, rows, alarm):
    said = parted(passed, rows)
    assert (said is None) if alarm is None else (alarm in said)


def test_evaluations_of_a_stopped_run():
    passed = [Evaluation(0, "policy@0", 9, 0.2, 0.1, 3, 1), Evaluation(5, "policy@5", 10, 0.4, None)]
    rows = [
        evaluation_row(passed[1], "score#1"),
        {"step": 3, "outcome": "committed", "version": 3},
        evaluation_row(passed[0], "score#1"),
    ]
    assert list(evaluations(rows, 5, "score#1").values()) == passed
    assert list(evaluations(rows, 4, "score#1")) == [0]
    anew = [*rows, {"step": 5, "outcome": "committed", "version": 5}]
    assert list(evaluations(anew, 5, "score#1")) == [0]  # version 5 is another one now
