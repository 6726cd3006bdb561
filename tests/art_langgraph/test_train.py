"""The door's own part: settings, scenarios, words for what is wrong. Whole runs with a server are in tests/e2e."""

import asyncio
import importlib
from pathlib import Path

import pytest
from art_backends import capture
from art_backends.config import TrainConfig
from art_backends.errors import ArtError, ConfigError, GraphError, ScenarioError

from art_langgraph.train import atrain, prepared, settled, train

MODULE = importlib.import_module("art_langgraph.train")  # art_langgraph.train itself is the function
TASKS = [{"id": str(index), "question": f"question {index}"} for index in range(10)]


def score(run):
    return 1.0


# settings


def test_settings_win_over_the_configuration(tmp_path):
    toml = tmp_path / "art.toml"
    toml.write_text("[art]\nsteps = 7\ngroup_size = 4\n")
    for config in (str(toml), toml, {"steps": 7, "group_size": 4}, TrainConfig(steps=7, group_size=4)):
        made = settled(config, {"steps": 3})
        assert (made.steps, made.group_size) == (3, 4)
    assert settled(None, {"steps": 2}).steps == 2
    assert settled(None, {}) == TrainConfig()


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (None, {"stepz": 1}, r"train\(\): there is no setting stepz; did you mean steps\?"),
        (None, {"steps": -1}, r"train\(\): steps must be at least 0, not -1"),
        (7, {}, "config must be a TrainConfig, a mapping or a TOML file, not int"),
        ("nothing.toml", {}, "nothing.toml: cannot be read"),
    ],
)
def test_wrong_settings_are_named(config, settings, words):
    with pytest.raises(ConfigError, match=words):
        settled(config, settings)


def test_of_a_file_and_settings_the_one_that_is_wrong_is_named(tmp_path):
    toml = tmp_path / "art.toml"
    toml.write_text("steps = -1\n")
    with pytest.raises(ConfigError) as caught:
        settled(toml, {"rank": 0})
    assert str(caught.value) == f"{toml}: steps must be at least 0, not -1; train(): rank must be at least 1, not 0"


# scenarios


def test_a_share_is_held_out_and_stays_the_same():
    training, testing = prepared(TASKS, 0.3, 0)
    assert (len(training), len(testing)) == (7, 3)
    assert prepared(TASKS, 0.3, 0)[1] == testing
    assert prepared(TASKS, None, 0) == (prepared(TASKS, None, 0)[0], [])


def test_held_out_scenarios_of_their_own():
    training, testing = prepared(TASKS[:5], TASKS[5:], 0)
    assert (len(training), len(testing)) == (5, 5)
    # the same id with other content is another scenario
    assert prepared(TASKS, [{"id": "1", "question": "another"}], 0)[1][0].id == "1"


def test_training_on_what_is_held_out_is_refused():
    with pytest.raises(ConfigError, match=r"2 held-out scenarios are among those to train on \(3, 4\)"):
        prepared(TASKS, TASKS[3:5], 0)


# what is wrong is said before a server is started


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a server was started")

    monkeypatch.setattr(MODULE, "LocalServer", started)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        # the graph first: nothing else makes sense without it
        ({"graph": "no_such_module:graph"}, GraphError, "no module 'no_such_module'"),
        ({"graph": 5}, GraphError, "not a graph"),
        ({"scenarios": "nothing.jsonl"}, ScenarioError, "nothing.jsonl: cannot be read"),
        ({"scenarios": []}, ScenarioError, "no scenarios"),
        ({"held_out": 1.5}, ScenarioError, "between 0 and 1"),
        ({"reward": "my_rewards:score"}, ConfigError, "reward must be a function of a run, not str"),
        ({"stepz": 5}, ConfigError, "stepz"),
    ],
)
def test_what_is_wrong_is_said(changes, error, words):
    async def agent(state):
        return state

    given = {"graph": lambda: None, "scenarios": TASKS, "reward": score, **changes}
    with pytest.raises(error, match=words):
        train(given.pop("graph"), **given)
    assert not capture.is_installed()


def test_a_factory_that_makes_no_graph():
    with pytest.raises(GraphError, match="which is not a graph"):
        train(lambda: 5, scenarios=TASKS, reward=score)


async def test_train_in_an_event_loop_says_what_to_do():
    with pytest.raises(ConfigError, match=r"await atrain\(\)"):
        train(lambda: None, scenarios=TASKS, reward=score)


async def test_capture_is_taken_back_when_the_run_fails(monkeypatch, tmp_path):
    class Backend:
        def __init__(self, config):
            self.client = None

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

    seen = []

    async def run(**settings):
        seen.append(capture.is_installed())
        raise ArtError("trouble")

    monkeypatch.setattr(MODULE, "LocalServer", Backend)
    monkeypatch.setattr(MODULE, "run", run)

    class Graph:
        async def ainvoke(self, value, config=None):
            return value

    with pytest.raises(ArtError, match="trouble"):
        await asyncio.wait_for(atrain(Graph(), scenarios=TASKS, reward=score, folder=tmp_path), 30)
    assert seen == [True]
    assert not capture.is_installed()


def test_the_door_is_open():
    import art_langgraph

    assert art_langgraph.train is train
    assert art_langgraph.atrain is atrain
    assert art_langgraph.__all__ == ["Report", "Run", "TrainConfig", "atrain", "delegate", "train"]
    assert Path(art_langgraph.__file__).with_name("py.typed").exists()
