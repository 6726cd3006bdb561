import pytest
from art_backends.trajectories import (
    Call,
    CallStatus,
    CaptureLevel,
    Choice,
    Node,
    PromptMode,
    Purpose,
    Rollout,
    RolloutError,
    Sampling,
    Trajectory,
    TrajectoryGroup,
    trajectory,
)
from pydantic import ValidationError

CALL = Call(
    id="call-1",
    rollout_id="rollout-1",
    sequence=2,
    status=CallStatus.OK,
    model="gpt-4o-mini",
    version="policy@3",
    node=Node(name="agent", step=1),
    request={"messages": [{"role": "user", "content": "grüß\u2028 😀"}], "n": 2},
    prompt_token_ids=[1, 2, 3],
    choices=[Choice(message={"content": None}, finish_reason="stop", token_ids=[4, 0], logprobs=[-0.1, -1e-9])],
    sampling=Sampling(temperature=0.7, seed=3),
    capture=CaptureLevel.TOKENS,
    prompt_mode=PromptMode.EXACT,
    continues="call-0",
    started=1.5,
)
ROLLOUT = Rollout(
    id="rollout-1",
    policy="policy",
    version="policy@3",
    scenario_id="s",
    scenario={"deep": [{"er": None}]},
    step=4,
    group="s",
    closed=True,
    output={"messages": []},
    reward=0.25,
    metrics={"success": 0.0},
    error=RolloutError(type="ValueError", message="words"),
    calls=[CALL],
)


@pytest.mark.parametrize("record", [CALL, ROLLOUT, TrajectoryGroup(group="s", trajectories=[trajectory(ROLLOUT)])])
def test_records_round_trip_through_json(record):
    assert type(record).model_validate_json(record.model_dump_json()) == record


def test_logprobs_keep_every_bit():
    values = [-0.1, -1e-300, -123.45678901234567, -5e-324]
    choice = Choice(token_ids=[1] * 4, logprobs=values)
    assert Choice.model_validate_json(choice.model_dump_json()).logprobs == values


@pytest.mark.parametrize("kind", [Call, Choice, Node, Rollout, Sampling, Trajectory, TrajectoryGroup])
def test_records_are_frozen_and_closed(kind):
    assert kind.model_config["frozen"]
    assert kind.model_config["extra"] == "forbid"


def test_an_unknown_field_and_a_change_are_errors():
    with pytest.raises(ValidationError, match="rewards"):
        Rollout(id="r", policy="p", version="p@0", rewards=1.0)
    with pytest.raises(ValidationError, match="frozen"):
        ROLLOUT.reward = 1.0


def test_a_closed_scored_rollout_is_a_trajectory():
    assert trajectory(ROLLOUT) == Trajectory(rollout_id="rollout-1", reward=0.25, calls=[CALL])


def test_what_the_agent_did_wrong_trains():
    assert trajectory(ROLLOUT.model_copy(update={"reward": 0.0, "output": None})).reward == 0.0


@pytest.mark.parametrize("changes", [{"closed": False}, {"fault": "engine"}, {"reward": None}, {"fault": ""}])
def test_open_faulty_and_unscored_rollouts_are_none(changes):
    assert trajectory(ROLLOUT.model_copy(update=changes)) is None


def test_defaults_claim_nothing():
    call = Call(id="c")
    assert (call.capture, call.status, call.drifted, call.excluded) == (CaptureLevel.TEXT, CallStatus.OPEN, False, None)
    rollout = Rollout(id="r", policy="p", version="p@0")
    assert (rollout.closed, rollout.reward, rollout.purpose) == (False, None, Purpose.TRAIN)
