"""The loop against the control interface in memory: whole runs, faults, rewards that misbehave, going on."""

import asyncio
import itertools
import json
import math
import re
import threading
from types import SimpleNamespace

import httpx2
import numpy
import openai
import pytest
from art_backends.errors import (
    ControlError,
    NothingToLearnError,
    RewardError,
    ScenarioError,
    ServerError,
    TrainingError,
)
from art_backends.scenarios import order
from art_backends.trajectories import Purpose

from tests.backends.memory_server import (
    HELD_OUT,
    SCENARIOS,
    MemoryServer,
    Notes,
    go,
    rows_of,
)

# a whole run


async def test_a_run_evaluates_trains_and_evaluates_again(tmp_path):
    server, notes = MemoryServer(), Notes()
    report = await go(server, tmp_path, display=notes)
    assert server.opened == {(Purpose.EVAL, 0): 3, (Purpose.TRAIN, 1): 4, (Purpose.TRAIN, 2): 4, (Purpose.EVAL, 2): 3}
    assert {r.version for r in server.store.values() if r.step == 0} == {"policy@0"}
    assert {r.version for r in server.store.values() if r.step == 2 and r.purpose == "train"} == {"policy@1"}
    assert {r.version for r in server.store.values() if r.step == 2 and r.purpose == "eval"} == {"policy@2"}
    assert (report.steps, report.rollouts, report.version, report.stopped) == (2, 8, "policy@2", "steps")
    assert (report.base_success, report.trained_success, report.held_out) == (1.0, 1.0, 3)
    assert report.confidence_interval == pytest.approx((0.4385, 1.0), abs=1e-4)
    assert report.computed_to_unique_tokens == pytest.approx(1.2)
    assert report.mean_abs_logprob_difference == pytest.approx(1e-5)
    assert report.drifted_calls == 0
    assert report.train_seconds > 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["trained_success"] == 1.0
    assert written["model_digest"] == "sha256:abc"
    assert [line.step for line in notes.steps] == [1, 2]
    assert [row["step"] for row in rows_of(tmp_path) if "step" in row] == [1, 2]


async def test_groups_of_a_step_are_the_scenarios_in_order(tmp_path):
    server = MemoryServer()
    await go(server, tmp_path, held_out=[], seed=7)
    for step in (1, 2):
        wanted = {SCENARIOS[index].id for index in order(7, step, 2, len(SCENARIOS))}
        assert {r.group for r in server.store.values() if r.step == step} == wanted
        assert sorted(server.trained[step]) == sorted(r.id for r in server.store.values() if r.step == step)


async def test_a_scenario_that_comes_twice_in_a_step_is_two_groups(tmp_path):
    server = MemoryServer()
    await go(server, tmp_path, held_out=[], steps=1, groups_per_step=len(SCENARIOS) + 1)
    groups = {r.group for r in server.store.values()}
    assert len(groups) == len(SCENARIOS) + 1
    assert any(group.endswith("#2") for group in groups)


async def test_no_held_out_scenarios_no_success(tmp_path):
    report = await go(MemoryServer(), tmp_path, held_out=[])
    assert report.base_success is None
    assert report.confidence_interval is None


async def test_target_success_ends_the_run_early_and_stays_reached(tmp_path):
    server = MemoryServer()
    report = await go(server, tmp_path, steps=9, target_success=0.9, target_steps=2)
    assert (report.steps, report.stopped) == (2, "target")
    again = await go(server, tmp_path, steps=9, target_success=0.9, target_steps=2)
    assert (again.steps, server.step) == (2, 2)


async def test_evaluates_every_n_steps(tmp_path):
    server = MemoryServer()
    report = await go(server, tmp_path, steps=3, eval_every=1)
    assert [passed.step for passed in report.evaluations] == [0, 1, 2, 3]
    assert server.opened[Purpose.EVAL, 3] == 3  # the last one is the final one


async def test_concurrency_is_bounded(tmp_path):
    running, most = 0, 0

    async def agent(scenario):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return {}

    await go(MemoryServer(), tmp_path, agent=agent, held_out=[], steps=1, group_size=8, concurrency=3)
    assert most == 3


async def test_success_function_judges_where_the_reward_does_not(tmp_path):
    turn = itertools.count()
    report = await go(
        MemoryServer(), tmp_path, reward=lambda run: next(turn) % 5 / 5, success=lambda run: run.scenario["n"] > 0
    )
    assert report.trained_success == pytest.approx(2 / 3)


# what the agent does wrong is data


async def test_an_agents_exception_is_scored_and_trained(tmp_path):
    seen = []

    async def agent(scenario):
        raise ValueError(f"no idea about {scenario['n']}")

    def reward(run):
        seen.append(run.error)
        return len(seen) % 2

    server = MemoryServer()
    report = await go(server, tmp_path, agent=agent, reward=reward, held_out=[], steps=1)
    assert (report.errors, report.faults) == (4, 0)
    assert {error.type for error in seen} == {"ValueError"}
    assert "no idea about" in seen[0].message
    assert "in agent" in seen[0].traceback
    assert len(server.trained[1]) == 4


@pytest.mark.parametrize("stubborn", [False, True])
async def test_an_agent_that_never_ends_is_ended(tmp_path, stubborn, monkeypatch):
    monkeypatch.setattr("art_backends.waiting.bounded.__kwdefaults__", {"grace": 0.05})
    never = asyncio.Event()

    async def agent(scenario):
        try:
            await never.wait()
        except asyncio.CancelledError:
            if not stubborn:
                raise
            await never.wait()

    turn = itertools.count()
    errors = []

    def reward(run):
        errors.append(run.error)
        return next(turn)

    await go(MemoryServer(), tmp_path, agent=agent, reward=reward, held_out=[], steps=1, rollout_timeout=0.05)
    never.set()
    assert len(errors) == 4
    assert {(error.type, error.message) for error in errors} == {
        ("TimeoutError", "the agent did not end within 0.05 s")
    }


@pytest.mark.parametrize("leaves", [SystemExit(3), asyncio.CancelledError()])
async def test_an_agent_that_ends_the_program_or_its_task_ends_its_rollout_only(tmp_path, leaves):
    async def agent(scenario):
        raise leaves

    server = MemoryServer()
    await go(server, tmp_path, agent=agent, held_out=[], steps=1)
    assert {r.error.type for r in server.store.values()} == {type(leaves).__name__}


async def test_an_agent_cannot_change_the_scenario_of_the_others(tmp_path):
    async def agent(scenario):
        scenario["n"] = "changed"
        return {}

    server = MemoryServer()
    await go(server, tmp_path, agent=agent, held_out=[], steps=1)
    assert all(isinstance(r.scenario["n"], int) for r in server.store.values())


async def test_outputs_that_are_no_json_are_kept_as_text(tmp_path):
    class Odd:
        def __repr__(self):
            raise RuntimeError

    async def agent(scenario):
        return {"nan": float("nan"), "set": {1}, "odd": Odd(), "half": "\ud800"}

    server = MemoryServer()
    await go(server, tmp_path, agent=agent, held_out=[], steps=1)
    output = next(iter(server.store.values())).output
    assert output["nan"] is None
    assert "whose repr raised" in json.dumps(output)


async def test_a_scenario_that_gives_no_input_ends_the_run(tmp_path):
    async def agent(scenario):
        raise ScenarioError("to_input could not make the graph's input")

    server = MemoryServer()
    with pytest.raises(ScenarioError, match="to_input could not make"):
        await go(server, tmp_path, agent=agent)
    assert all(r.closed and r.fault for r in server.store.values())


# what the world does wrong is a fault


def engine_error(status):
    request = httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions")
    if status is None:
        return openai.APIConnectionError(request=request)
    return openai.APIStatusError("trouble", response=httpx2.Response(status, request=request), body=None)


@pytest.mark.parametrize("status", [None, 500, 502, 503, 429, 401])
async def test_engine_trouble_is_a_fault_and_played_again(tmp_path, status):
    fails = {"left": 2}

    async def agent(scenario):
        if fails["left"]:
            fails["left"] -= 1
            try:
                raise engine_error(status)
            except openai.OpenAIError as error:
                raise ValueError("a tool wrapped it") from error
        return {}

    server = MemoryServer()
    report = await go(server, tmp_path, agent=agent, held_out=[], steps=1)
    assert sum((r.fault or "").startswith("engine:") for r in server.store.values()) == 2
    assert (report.rollouts, report.faults, len(server.trained[1])) == (4, 0, 4)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_wrong_request_is_the_agents_error(tmp_path, status):
    async def agent(scenario):
        raise engine_error(status)

    server = MemoryServer()
    report = await go(server, tmp_path, agent=agent, held_out=[], steps=1)
    assert (report.errors, report.faults) == (4, 0)


async def test_an_engine_that_stays_away_ends_the_run(tmp_path):
    async def agent(scenario):
        raise engine_error(503)

    server = MemoryServer()
    with pytest.raises(ServerError, match=r"step 1: no rollout came through: engine: HTTP 503"):
        await go(server, tmp_path, agent=agent, held_out=[])
    assert not server.trained


async def test_a_server_that_is_gone_ends_the_run_at_once(tmp_path):
    server = MemoryServer()
    server.fail["open_rollout"] = [ServerError("the server cannot be reached")]
    with pytest.raises(ServerError, match="cannot be reached"):
        await go(server, tmp_path)
    assert all(r.closed for r in server.store.values())


async def test_a_rollout_that_the_server_refuses_to_close_is_excluded(tmp_path):
    server = MemoryServer()
    server.fail["close_rollout"] = [ControlError("the output is too large", 413, "too_large")] * 3
    report = await go(server, tmp_path, held_out=[], steps=1)
    assert report.rollouts == 4
    assert all(server.store[id].closed for id in server.trained[1])


async def test_a_failed_step_ends_the_run_and_the_next_run_repeats_only_the_training(tmp_path):
    server = MemoryServer()
    server.fail["train_step"] = [TrainingError("disk full")]
    with pytest.raises(TrainingError, match="disk full"):
        await go(server, tmp_path, held_out=[], steps=1)
    played = dict(server.opened)
    report = await go(server, tmp_path, held_out=[], steps=1)
    assert server.opened == played
    assert report.steps == 1


async def test_training_without_progress_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("art_backends.loop.STALL_SECONDS", 0.05)
    never = asyncio.Event()

    class Hung(MemoryServer):
        async def train_step(self, *arguments, **settings):
            await never.wait()

    with pytest.raises(TrainingError, match="no progress"):
        await go(Hung(), tmp_path, held_out=[])


# rewards that misbehave (R24): excluded, counted, never 0.0


def raises(run):
    raise KeyError("answer")


def hangs(run):
    HANG.wait(30)


async def async_hangs(run):
    await asyncio.Event().wait()


async def async_raises(run):
    raise SystemExit(1)


MISBEHAVIOUR = {
    "raises": (raises, r"raised KeyError: 'answer' \(test_loop.py:\d+\)"),
    "async raises": (async_raises, r"raised RuntimeError: SystemExit: 1"),
    "hangs": (hangs, r"did not return within 1 s"),
    "async hangs": (async_hangs, r"did not return within 1 s"),
    "none": (lambda run: None, r"returned None: .*return statement missing"),
    "nan": (lambda run: math.nan, r"returned nan: "),
    "inf": (lambda run: -math.inf, r"returned -inf: "),
    "text": (lambda run: "0.5", r"returned a str \('0.5'\)"),
    "list": (lambda run: [0.5, 1.0], r"returned a list \(\[0.5, 1.0\]\)"),
    "array": (lambda run: numpy.ones((2, 3)), r"returned a ndarray of shape \(2, 3\)"),
    "array of one": (lambda run: numpy.ones(1), r"returned a ndarray of shape \(1,\)"),
    "no reward": (lambda run: {"score": 1.0}, r"""returned a mapping without "reward" \(it has 'score'\)"""),
    "part none": (lambda run: {"reward": 1, "style": None}, r"returned None in part 'style'"),
    "part nan": (lambda run: {"reward": 1, "style": math.nan}, r"returned nan in part 'style'"),
    "key": (lambda run: {"reward": 1, 5: 1}, r"returned a mapping with the key 5"),
}
HANG = threading.Event()


def patience(kind):
    return 1.0 if kind.endswith("hangs") else 60.0


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch):
    """Drawing takes a second; test_report.py does it."""
    monkeypatch.setattr("art_backends.loop.can_draw", lambda: False)


@pytest.fixture(autouse=True)
def _release_hung_threads():
    HANG.clear()
    yield
    HANG.set()


@pytest.mark.parametrize("kind", MISBEHAVIOUR)
async def test_a_reward_that_misbehaves_is_excluded_and_never_zero(tmp_path, kind):
    bad, _ = MISBEHAVIOUR[kind]
    turn = itertools.count()
    lock = threading.Lock()

    async def mixed(run):
        with lock:
            now = next(turn)
        if now % 4 == 1:
            value = bad(run) if not kind.endswith("hangs") else async_hangs(run)
            return await value if hasattr(value, "__await__") else value
        return float(now % 4)

    server = MemoryServer()
    report = await go(server, tmp_path, reward=mixed, held_out=[], steps=1, group_size=4, reward_timeout=patience(kind))
    bad_ones = [r for r in server.store.values() if r.fault]
    assert report.faults == len(bad_ones) == 2
    assert all(r.fault.startswith("reward: ") and r.reward is None and r.metrics == {} for r in bad_ones)
    assert not {r.id for r in bad_ones} & set(server.trained[1])
    assert len(server.trained[1]) == 6


@pytest.mark.parametrize("kind", MISBEHAVIOUR)
async def test_a_reward_that_fails_for_a_whole_step_ends_the_run(tmp_path, kind):
    bad, words = MISBEHAVIOUR[kind]
    server = MemoryServer()
    with pytest.raises(RewardError, match="step 1: the reward function failed for every rollout.*" + words):
        await go(server, tmp_path, reward=bad, held_out=[], steps=1, reward_timeout=patience(kind))
    assert len(server.store) == 4  # not played again: a reward does not get better by that
    assert not server.trained


async def test_a_success_function_that_raises_is_a_fault(tmp_path):
    with pytest.raises(RewardError, match="it gave a reward, but the success function raised ZeroDivisionError"):
        await go(MemoryServer(), tmp_path, success=lambda run: 1 / 0, reward=lambda run: 1.0, held_out=[])


@pytest.mark.parametrize("form", ["sync", "async", "callable", "returns a coroutine"])
async def test_rewards_see_the_calls(tmp_path, form):
    turn = itertools.count()

    def sync(run):
        return {"reward": next(turn), "calls": len(run.calls), "tokens": len(run.calls[0].choices[0].token_ids)}

    async def asynchronous(run):
        return sync(run)

    class Callable:
        async def __call__(self, run):
            return sync(run)

    def returns_one(run):
        return asynchronous(run)

    forms = {"sync": sync, "async": asynchronous, "callable": Callable(), "returns a coroutine": returns_one}
    server = MemoryServer()
    await go(server, tmp_path, reward=forms[form], held_out=[], steps=1)
    assert {r.metrics["calls"] for r in server.store.values()} == {1.0}
    assert not any(r.fault for r in server.store.values())


# nothing to learn from (R25)


async def test_three_steps_without_a_spread_end_the_run(tmp_path):
    server, notes = MemoryServer(), Notes()
    with pytest.raises(NothingToLearnError, match=r"3 steps in a row.*0 ×4.*What helps: .*--group-size"):
        await go(server, tmp_path, reward=lambda run: 0.0, steps=9, display=notes)
    assert server.version == 0
    assert server.step == 3
    assert "step 1: nothing to learn from (no group has a spread of rewards); rewards: 0 ×4" in notes.text


async def test_steps_without_a_spread_end_a_run_that_learned_with_its_report(tmp_path):
    server, notes = MemoryServer(), Notes()
    turn = itertools.count()
    report = await go(server, tmp_path, steps=40, display=notes, held_out=[], reward=lambda run: next(turn) in (1, 3))
    assert (server.version, server.step) == (1, 9)  # one that learned, eight that could not
    assert (report.stopped, report.version, report.steps) == ("no_spread", "policy@1", 9)
    assert "in 8 steps in a row: the run ends" in notes.text


async def test_an_agent_that_fails_from_some_step_on_is_told_even_after_something_was_learned(tmp_path):
    server, calls = MemoryServer(), itertools.count()

    async def agent(scenario):
        if next(calls) >= 4:
            raise ConnectionError("the shop's database is gone")
        return {}

    turn = itertools.count()
    with pytest.raises(NothingToLearnError, match="database is gone"):
        await go(server, tmp_path, steps=40, agent=agent, held_out=[], reward=lambda run: next(turn) in (1, 3))
    assert (server.version, server.step) == (1, 4)


async def test_groups_without_a_spread_are_replaced(tmp_path):
    server, turn = MemoryServer(), itertools.count()
    with pytest.raises(NothingToLearnError, match="in 1 step no group"):
        await go(server, tmp_path, steps=1, held_out=[], reward=lambda run: next(turn) % 2 if next(turn) > 8 else 0.0,
                 dynamic_sampling=3, concurrency=1)  # fmt: skip
    assert server.opened[Purpose.TRAIN, 1] == 10  # two groups, and three more of two rollouts
    assert len(server.trained[1]) == 10


async def test_an_agent_whose_calls_are_all_constrained_is_told_before_training(tmp_path):
    for held_out in (HELD_OUT, []):
        server = MemoryServer(constrained=True)
        with pytest.raises(NothingToLearnError, match=r"response_format.*tool_choice"):
            await go(server, tmp_path, held_out=held_out)
        assert not server.trained


async def test_nodes_that_make_no_call_are_told_with_those_that_do(tmp_path):
    server = MemoryServer()
    with pytest.raises(NothingToLearnError, match=r"no model call came from agnt \(nodes\).*from: agent/model"):
        await go(server, tmp_path, nodes=["agnt"])
    assert not server.trained
    await go(server, tmp_path, nodes=["agent"])
    assert server.trained


async def test_rewards_of_nodes_that_make_no_call_are_told_with_those_that_do(tmp_path):
    server, notes = MemoryServer(), Notes()
    turn = itertools.count()
    parts = {"node/agnt": 1.0, "node/agent": 0.5, "node/model": 0.0}
    await go(server, tmp_path, display=notes, reward=lambda run: {"reward": next(turn) % 2, **parts})
    said = "the reward has node/agnt, and no call came from such a node; calls came from: agent/model"
    assert notes.text.count(said) == 1


async def test_an_agent_without_captured_calls_is_told(tmp_path):
    with pytest.raises(NothingToLearnError, match="no model call that was captured"):
        await go(MemoryServer(calls=False), tmp_path)


async def test_an_agent_that_fails_at_once_is_told_its_error(tmp_path):
    async def agent(scenario):
        raise ImportError("no module named my_tools")

    with pytest.raises(NothingToLearnError, match=r"ImportError: no module named my_tools \(×3\)\nTraceback"):
        await go(MemoryServer(calls=False), tmp_path, agent=agent)


# going on


async def test_a_run_goes_on_where_it_stood(tmp_path):
    server = MemoryServer()
    await go(server, tmp_path, steps=2)
    report = await go(server, tmp_path, steps=3)
    assert server.opened[Purpose.EVAL, 0] == 3  # the base is not evaluated again
    assert server.opened[Purpose.TRAIN, 3] == 4
    assert [row["step"] for row in rows_of(tmp_path) if "step" in row] == [1, 2, 3]
    assert sum(row.get("evaluation") == 0 for row in rows_of(tmp_path)) == 1
    assert (report.steps, report.rollouts) == (3, 12)
    assert report.train_seconds == pytest.approx(sum(row.get("seconds", 0) for row in rows_of(tmp_path)))


async def test_an_interrupted_step_plays_only_what_is_missing(tmp_path):
    three_are_closed, never = asyncio.Event(), asyncio.Event()
    count = itertools.count()

    async def agent(scenario):
        if next(count) >= 3:  # the first three of four end
            await never.wait()
        return {}

    class Watching(Notes):
        def advance(self, done):
            if done == 3:
                three_are_closed.set()

    server, notes = MemoryServer(), Watching()
    task = asyncio.ensure_future(go(server, tmp_path, agent=agent, held_out=[], steps=1, display=notes))
    await asyncio.wait_for(three_are_closed.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [r.fault for r in server.store.values()] == [None, None, None, "interrupted"]
    assert all(r.closed for r in server.store.values())
    assert "stopped in step 1; nothing that was finished is lost: the same command goes on" in notes.text
    assert rows_of(tmp_path)[-1]["interrupted"] == 1
    report = await go(server, tmp_path, held_out=[], steps=1)
    assert server.opened[Purpose.TRAIN, 1] == 5
    assert report.rollouts == 4


@pytest.mark.parametrize(("max_staleness", "opened"), [(0, 8), (1, 4)])
async def test_rollouts_of_an_older_version_are_reused_as_far_as_they_may_be_stale(tmp_path, max_staleness, opened):
    server = MemoryServer()
    server.fail["train_step"] = [TrainingError("killed")]
    with pytest.raises(TrainingError):
        await go(server, tmp_path, held_out=[], steps=1)
    server.version = 1
    await go(server, tmp_path, held_out=[], steps=1, max_staleness=max_staleness)
    assert server.opened[Purpose.TRAIN, 1] == opened


async def test_a_step_committed_but_not_written_down_is_recovered(tmp_path):
    server = MemoryServer()
    await go(server, tmp_path, steps=2)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step") != 2 and json.loads(line).get("evaluation") != 2]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(kept) + b'{"step": 2, "outco')
    report = await go(server, tmp_path, steps=2)
    assert server.opened[Purpose.TRAIN, 2] == 4
    assert [row["step"] for row in rows_of(tmp_path) if "step" in row] == [1, 2]
    assert (report.steps, report.rollouts) == (2, 8)


async def test_figures_of_versions_that_are_gone_do_not_count(tmp_path):
    await go(MemoryServer(), tmp_path, steps=2)
    report = await go(MemoryServer(), tmp_path, steps=1)  # a new server on an old metrics file
    assert report.steps == 1


async def test_a_sink_that_raises_is_switched_off(tmp_path):
    class Broken:
        calls = 0

        def write(self, row):
            self.calls += 1
            raise OSError("tracker is down")

        def close(self):
            return None

    broken, notes = Broken(), Notes()
    await go(MemoryServer(), tmp_path, sinks=[broken], display=notes)
    assert broken.calls == 1
    assert "warning: metrics sink Broken is switched off: OSError: tracker is down" in notes.text


async def test_a_policy_that_the_server_does_not_have(tmp_path):
    with pytest.raises(ServerError, match="no policy 'policy'"):
        await go(MemoryServer(name="other"), tmp_path)


async def test_an_alarm_when_the_held_out_reward_falls_while_the_sampled_one_rises(tmp_path):
    server = MemoryServer()

    def reward(run):
        if run.scenario["id"].startswith("h"):
            return 0.9 - 0.1 * now.server.version
        return 0.1 * now.server.version + 0.01 * (next(turns) % 2)

    now, turns = SimpleNamespace(server=server), itertools.count(1)
    notes = Notes()
    settings = {"steps": 4, "eval_every": 1, "reward": reward}
    report = await go(server, tmp_path, display=notes, **settings)
    assert len(report.alarms) == 3  # from the second evaluation that was worse than the first
    assert "the held-out reward went from 0.900 to 0.700" in report.alarms[0]
    assert "warning: the sampled reward rose from 0.005 to 0.105 since policy@0" in notes.text
    assert [row["evaluation"] for row in rows_of(tmp_path) if "alarm" in row] == [2, 3, 4]
    again = await go(server, tmp_path, **settings)
    assert again.alarms == report.alarms
    assert [passed.step for passed in again.evaluations] == [0, 1, 2, 3, 4]


async def test_another_reward_is_measured_anew_and_never_compared_with_the_one_before(tmp_path):
    def first(run):
        return next(turn) % 2 / 2

    def second(run):
        return 1 + next(turn) % 2

    server, turn = MemoryServer(), itertools.count()
    was = await go(server, tmp_path, reward=first)
    notes = Notes()
    report = await go(server, tmp_path, reward=second, steps=3, display=notes)
    assert "last figures are of another reward: it was " in notes.text
    assert re.search(r"it was \S+first and is \S+second now", notes.text)
    assert was.base_reward < 1 <= report.base_reward
    assert server.opened[Purpose.EVAL, 0] == 6  # the base once more
    assert [passed.step for passed in report.evaluations] == [0, 3]  # that of step 2 is the first reward's
    assert [row.get("scored_by") for row in rows_of(tmp_path) if "outcome" in row] == [
        *[r.scored_by for r in server.store.values() if r.step in (1, 2) and r.purpose == Purpose.TRAIN][:2],
        next(r.scored_by for r in server.store.values() if r.step == 3),
    ]
    once_more = Notes()
    await go(server, tmp_path, reward=second, steps=3, display=once_more)
    assert "another reward" not in once_more.text
    assert server.opened[Purpose.EVAL, 0] == 6


async def test_success_of_another_reward_does_not_reach_the_target(tmp_path):
    server = MemoryServer()
    await go(server, tmp_path, steps=2)  # success 1.0
    turn = itertools.count()
    notes = Notes()
    settings = {"reward": lambda run: {"reward": next(turn) % 2, "success": 0.5}, "target_success": 0.9}
    report = await go(server, tmp_path, steps=3, target_steps=2, display=notes, **settings)
    assert (report.steps, report.stopped) == (3, "steps")


async def test_rollouts_of_a_step_that_was_stopped_are_played_again_for_another_reward(tmp_path):
    server, turn = MemoryServer(), itertools.count()
    server.fail["train_step"] = [ServerError("away")]
    with pytest.raises(ServerError):
        await go(server, tmp_path)
    await go(server, tmp_path, reward=lambda run: {"reward": next(turn) % 2})
    assert len([r for r in server.store.values() if r.step == 1 and r.purpose == Purpose.TRAIN]) == 8
    assert not {r.id for r in list(server.store.values())[:7]} & set(server.trained[1])


async def test_a_run_that_goes_on_says_where_and_a_finished_one_that_nothing_is_left(tmp_path):
    server, notes = MemoryServer(), Notes()
    await go(server, tmp_path, display=notes)
    assert "going on" not in notes.text
    assert "nothing is left" not in notes.text
    await go(server, tmp_path, display=notes)
    assert "nothing is left to train: all 2 steps are made (policy@2); more --steps go on" in notes.lines
    await go(server, tmp_path, steps=3, display=notes)
    assert "going on from policy@2, after step 2 of 3" in notes.lines
    await go(server, tmp_path, steps=9, target_success=0.9, target_steps=2, display=notes)
    assert "nothing is left to train: step 3 had reached target_success (policy@3)" in notes.lines


async def test_each_kind_of_agent_error_is_told_once_with_where_to_look(tmp_path):
    server, notes, turn = MemoryServer(), Notes(), itertools.count()

    async def agent(scenario):
        if next(turn) % 2:
            raise ValueError("no such tool")
        return {}

    await go(server, tmp_path, agent=agent, steps=3, held_out=[], display=notes, concurrency=1)
    (told,) = [line for line in notes.lines if "failed in" in line]
    failed = next(r.id for r in server.store.values() if r.error is not None)
    assert told == (
        "warning: step 1: the agent failed in 2 of 4 rollouts: ValueError: no such tool (×2); look at one: "
        f"art-backends rollouts show {failed} --folder {tmp_path}"
    )


async def test_a_run_whose_few_steps_all_had_no_spread_ends_as_one_that_learned_nothing(tmp_path):
    notes = Notes()
    with pytest.raises(NothingToLearnError, match=r"in 2 steps in a row no group .* What helps"):
        await go(MemoryServer(), tmp_path, reward=lambda run: 0.5, display=notes)
    assert sum("What helps" in line for line in notes.lines) == 1  # with the first, not with each


async def test_a_run_that_used_its_steps_up_without_learning_says_so_again(tmp_path):
    server = MemoryServer()
    with pytest.raises(NothingToLearnError, match="What helps"):
        await go(server, tmp_path, reward=lambda run: 0.5)
    with pytest.raises(NothingToLearnError, match=r"all 2 steps are made, .* more --steps go on"):
        await go(server, tmp_path, reward=lambda run: 0.5)


async def test_a_pinned_version_is_told_in_the_end(tmp_path):
    class Pinned(MemoryServer):
        async def status(self):
            status = await super().status()
            status["policies"][0]["pinned"] = 1
            return status

    notes = Notes()
    await go(Pinned(), tmp_path, display=notes)
    assert "apps are answered by policy@1, which is pinned: art-backends versions unpin" in notes.text
