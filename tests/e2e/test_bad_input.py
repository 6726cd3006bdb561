"""What a user can get wrong: one clear line on standard error, exit code 2, no traceback of ours, nothing lost.

The command is called in this process; where a case needs a server, all share one that runs (starting it is what takes
time). What only a start can meet is tried with the real command.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.client import Client
from art_backends.config import TrainConfig

from art_langgraph.cli import main

pytestmark = pytest.mark.timeout(180)

NUMBERS = itertools.count()
ONE_CALL = """
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4o-mini", max_completion_tokens=4, max_retries=0)


async def agent(state: MessagesState) -> dict:
    {body}


builder = StateGraph(MessagesState)
builder.add_node("agent", agent)
builder.add_edge(START, "agent")
graph = builder.compile()
"""
ANSWER = 'return {"messages": [await model.ainvoke(state["messages"])]}'
FINE = "def score(run):\n    return {'reward': len(str(run.output)), 'success': True}\n"


@dataclass
class Tried:
    code: int
    out: str
    err: str


@dataclass
class Case:
    """A user's folder; ``train`` runs the command in it."""

    path: Path
    arguments: list[str]
    capsys: pytest.CaptureFixture[str]

    def write(self, *, app: str = ONE_CALL.format(body=ANSWER), reward: str = FINE) -> None:
        number = next(NUMBERS)  # modules are kept by their names
        (self.path / f"app_{number}.py").write_text(app)
        (self.path / f"reward_{number}.py").write_text(reward)
        tasks = [{"id": f"{number}-{i}", "messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(4)]
        (self.path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        self.graph, self.reward = f"app_{number}:graph", f"reward_{number}:score"

    def train(self, *more: str) -> Tried:
        found = ["train", self.graph, "--reward", self.reward, *self.arguments, *more]
        code = main(found)
        said = self.capsys.readouterr()
        return Tried(code, said.out, said.err)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Case]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("OPENAI_API_KEY", "a-fake-key")
    modules = set(sys.modules)
    made = Case(tmp_path, ["--scenarios", "tasks.jsonl", "--folder", "run", "--base-model", "./no-model"], capsys)
    made.write()
    yield made
    for name in set(sys.modules) - modules:
        if name.startswith(("app_", "reward_")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def server(shared_project: Any, waiting: Callable[..., Any]) -> Any:
    """A project whose folder is served for the whole module."""
    options = ["--base-model", str(shared_project.model), "--rank", "2", "--threads", "1", "--max-model-len", "256"]
    process = shared_project.start("art-backends", "serve", "--folder", "run", "--port", "0", *options)
    waiting(lambda: (shared_project.run / "server.json").exists() or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()[1]
    return shared_project


@pytest.fixture
def served(case: Case, server: Any, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case whose command finds a server that runs, in place of starting one."""
    url = json.loads((server.run / "server.json").read_text())["url"]
    token = (server.run / "admin.token").read_text().strip()

    class Attached:
        def __init__(self, config: TrainConfig) -> None:
            self.client = Client(url, token)

        async def __aenter__(self) -> Attached:
            return self

        async def __aexit__(self, *_: object) -> None:
            await self.client.aclose()

    monkeypatch.setattr(sys.modules["art_langgraph.train"], "LocalServer", Attached)
    case.arguments += ["--steps", "1000", "--groups-per-step", "1", "--group-size", "2", "--base-model", "x"]
    case.arguments += ["--rank", "2", "--threads", "1"]
    return case


def one_line(tried: Tried, *words: str) -> None:
    assert tried.code == 2, tried
    assert tried.err.startswith("art-langgraph: "), tried.err
    assert tried.err.count("\n") == 1, tried.err
    assert "Traceback" not in tried.err
    for word in words:
        assert word in tried.err, tried.err


# ---- what is found before anything is started


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("5", ["is int 5, not a graph"]),
        ("{}", ["is dict {}, not a graph"]),
        ("model", ["is ChatOpenAI", "not a graph"]),
        ("MessagesState", ["The factory", "returned dict {}, which is not a graph"]),
    ],
)
def test_not_a_graph(case: Case, value: str, words: list[str]) -> None:
    case.write(app=ONE_CALL.format(body=ANSWER) + f"\nworkflow = graph\ngraph = {value}\n")
    tried = case.train()
    one_line(tried, *words)
    assert value == "MessagesState" or "has these graphs: builder, workflow" in tried.err


def test_no_such_module_attribute_or_file(case: Case) -> None:
    for graph, words in (
        ("app_that_is_missing:graph", "no module 'app_that_is_missing'"),
        (case.graph.replace("graph", "grph"), "no attribute 'grph'; it has these graphs: builder, graph"),
        ("./missing.py:graph", "There is no file"),
    ):
        case.graph = graph
        one_line(case.train(), words)


def test_an_import_error_of_the_app_comes_with_its_own_traceback(case: Case) -> None:
    case.write(app="import json\n\nSETTINGS = json.loads('{')\n")
    tried = case.train()
    assert tried.code == 2
    name = case.graph.partition(":")[0]
    assert tried.err.startswith(f"art-langgraph: {name} could not be imported:\n\nTraceback (most recent call last):\n")
    assert f'{name}.py", line 3, in <module>' in tried.err
    assert tried.err.rstrip().splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert "art_langgraph" not in tried.err
    case.write(app="import a_package_that_is_missing\n")
    assert "ModuleNotFoundError: No module named 'a_package_that_is_missing'" in case.train().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"question": "a"}\n{"question": \n', ["tasks.jsonl, line 2: not valid JSON", "column"]),
        ('{"question": "a"}\n\n[1]\n', ["tasks.jsonl, line 3: each scenario must be a JSON object, this is an array"]),
        ('{"id": "a"}\n{"id": "a", "b": 1}\n', ["tasks.jsonl, line 2: id 'a' repeats tasks.jsonl, line 1"]),
        ('{"question": NaN}\n', ["tasks.jsonl, line 1: NaN is not JSON"]),
        ("\n\n", ["tasks.jsonl: no scenarios: write one JSON object per line"]),
        ("", ["tasks.jsonl: no scenarios"]),
    ],
)
def test_scenario_files(case: Case, content: str, words: list[str]) -> None:
    (case.path / "tasks.jsonl").write_text(content)
    one_line(case.train(), *words)


def test_settings_and_rewards_that_are_not_there(case: Case) -> None:
    one_line(case.train("--rank", "0"), "--rank must be at least 1, not 0")
    one_line(case.train("--scenarios", "missing.jsonl"), "missing.jsonl", "No such file")
    case.reward = case.reward.replace("score", "scores")
    one_line(case.train(), "--reward", "has no 'scores'")
    assert not (case.path / "run").exists()  # nothing was started for it


# ---- rewards


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('price')", ["raised KeyError: 'price' (reward_", ".py:2)"]),
        ("import time; time.sleep(3)", ["did not return within 0.2 s (reward_timeout)"]),
        ("return None", ["returned None", "is a return statement missing?"]),
        ("return float('nan')", ["returned nan", "must be a finite number"]),
        ("return 'good'", ["returned a str ('good')", "must be a finite number"]),
        ("return [1.0, 2.0]", ["returned a list ([1.0, 2.0])"]),
        ("return {'score': 1.0}", ["""returned a mapping without "reward" (it has 'score')"""]),
        ("return {'reward': 1.0, 'speed': None}", ["returned None in part 'speed'"]),
        ("raise SystemExit(3)", ["SystemExit: 3"]),
    ],
)
def test_a_reward_that_always_fails(served: Case, body: str, words: list[str]) -> None:
    served.write(reward=f"def score(run):\n    {body}\n")
    one_line(served.train("--reward-timeout", "0.2"), "the reward function failed for every rollout", *words)


def test_nothing_is_lost_by_a_reward_that_failed_for_some(served: Case, server: Any) -> None:
    """Half of the rewards fail, which end as faults and never as 0; when the reward is mended, the run goes on."""
    served.write(reward="def score(run):\n    assert len(str(run.output)) % 2, 'odd'\n    raise ValueError\n")
    one_line(served.train(), "the reward function failed")
    step = server.ask("/status")["policies"][0]["step"]
    kept = server.ask(f"/rollouts?step={step + 1}&closed=true&limit=500")["rollouts"]
    mine = [r for r in kept if r["scenario_id"].startswith(served.graph.split("_")[1].split(":")[0] + "-")]
    assert mine
    assert all(r["reward"] is None and r["fault"].startswith("reward: ") for r in mine)
    (served.path / served.reward.replace(":score", ".py")).write_text(FINE)
    del sys.modules[served.reward.partition(":")[0]]
    done = served.train("--steps", str(step + 1), "--group-size", "6")
    assert done.code == 0, done.err
    assert server.ask("/status")["policies"][0]["step"] == step + 1


# ---- graphs


def test_a_graph_that_raises_at_once(served: Case) -> None:
    served.write(app=ONE_CALL.format(body="raise LookupError('no such customer')"))
    tried = served.train()
    assert tried.code == 2
    first = tried.err.splitlines()[0]
    assert first.startswith("art-langgraph: nothing to learn from: the agent failed before its first model call")
    assert "LookupError: no such customer" in first
    assert f"{served.graph.partition(':')[0]}.py" in tried.err  # the app's own traceback


def test_a_graph_that_raises_after_its_call(served: Case) -> None:
    served.write(
        app=ONE_CALL.format(body='await model.ainvoke(state["messages"]); raise LookupError("no such customer")'),
        reward="def score(run):\n    assert run.error.type == 'LookupError' and run.output is None\n    return 0.0\n",
    )
    one_line(served.train(), "nothing to learn from", "LookupError: no such customer")


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_graph_that_leaves_the_process_after_its_call(served: Case, kind: str) -> None:
    body = 'await model.ainvoke(state["messages"]); raise SystemExit("no licence")'
    app = ONE_CALL.format(body=body if kind == "async def" else body.replace("await model.ainvoke", "model.invoke"))
    served.write(
        app=app.replace("async def", kind),
        reward="def score(run):\n    assert run.error.message == 'SystemExit: no licence'\n    return 0.0\n",
    )
    one_line(served.train(), "nothing to learn from", "SystemExit: no licence")


def test_a_graph_that_never_ends(served: Case) -> None:
    body = 'import asyncio; await model.ainvoke(state["messages"]); await asyncio.Event().wait()'
    served.write(
        app=ONE_CALL.format(body=body),
        reward="def score(run):\n    assert run.error.type == 'TimeoutError'\n    return 0.0\n",
    )
    one_line(
        served.train("--rollout-timeout", "1"),
        "nothing to learn from",
        "TimeoutError: the agent did not end within 1 s",
    )


def test_a_graph_whose_thread_never_ends(served: Case) -> None:
    app = (
        ONE_CALL.format(body="...")
        .replace("async def", "def")
        .replace("    ...", '    model.invoke(state["messages"])\n    EVER.wait()\n    return {}')
    )
    served.write(app="import threading\n\nEVER = threading.Event()\n" + app, reward="def score(run):\n    return 0.0\n")
    try:
        tried = served.train("--rollout-timeout", "1")
    finally:
        ever: threading.Event = sys.modules[served.graph.partition(":")[0]].EVER
        ever.set()
    one_line(tried, "nothing to learn from", "TimeoutError: the agent did not end within 1 s")


def test_no_model_call(served: Case) -> None:
    served.write(app=ONE_CALL.format(body='return {"messages": ["hello"]}'))
    one_line(served.train(), "nothing to learn from: the agent made no model call that was captured", "openai SDK")


def test_a_prompt_beyond_the_context(served: Case) -> None:
    body = 'return {"messages": [await model.ainvoke("and on " * 400)]}'
    served.write(app=ONE_CALL.format(body=body), reward="def score(run):\n    return 0.0\n")
    one_line(served.train(), "nothing to learn from", "maximum context length is 256 tokens")


def test_no_spread_in_any_group(served: Case) -> None:
    served.write(reward="def score(run):\n    return 0.25\n")
    tried = served.train()
    one_line(tried, "nothing to learn from: in 3 steps in a row", "0.25 ×2", "What helps: a reward with parts")
    assert tried.out.count("nothing to learn from (no_spread)") == 3


def test_all_calls_constrained(served: Case) -> None:
    body = """shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    return {"messages": [await model.bind(response_format=shape).ainvoke(state["messages"])]}"""
    served.write(app=ONE_CALL.format(body=body))
    one_line(
        served.train(), "nothing to learn from: every model call of the agent is constrained by a grammar", "What helps"
    )


def test_the_server_is_none_the_worse(served: Case, server: Any) -> None:
    """After all these cases: no rollout is open, nothing is in flight, and a run trains."""
    status = server.ask("/status")
    assert status["rollouts"]["open"] == 0
    assert (status["proxy"]["in_flight"], status["proxy"]["waiting"]) == (0, 0)
    assert [child["restarts"] for child in status["children"]] == [0]
    done = served.train("--group-size", "6", "--steps", str(status["policies"][0]["step"] + 1))
    assert done.code == 0, done.err
    with httpx.Client(trust_env=False) as client:
        url = json.loads((server.run / "server.json").read_text())["url"]
        assert client.get(f"{url}/health").json() == {"status": "ok"}


# ---- what only a start can meet: the real command


def test_a_model_that_is_not_found(project: Any) -> None:
    tried = project.call("art-langgraph", *project.training("--base-model", "nobody/no-such-model"))
    assert (tried.code, "Traceback" in tried.err) == (2, False)
    lines = tried.err.splitlines()
    assert lines[0] == "art-langgraph: base model 'nobody/no-such-model' was not found. Tried:"
    assert lines[1].strip().startswith("- folder nobody/no-such-model: not there")
    assert any(line.strip().startswith("- hub") for line in lines)
    assert "config.json and *.safetensors" in lines[-1]
    assert not (project.run / "policy.json").exists()  # the folder can be used with another model


def test_a_model_without_a_chat_template(project: Any, model_without_template: Path) -> None:
    tried = project.call("art-langgraph", *project.training("--base-model", str(model_without_template)))
    assert tried.code == 2
    assert tried.err.count("\n") == 1
    assert "the model has no chat template" in tried.err
    assert "--chat-template" in tried.err


def test_another_shape_of_adapter_on_a_folder(trained: Any) -> None:
    before = sorted(trained.run.rglob("*.safetensors"))
    tried = trained.call("art-langgraph", *trained.training("--rank", "4"))
    assert tried.code == 2
    assert tried.err.count("\n") == 1
    assert "rank: " in tried.err
    assert "was made with 2, now asked for 4" in tried.err
    assert sorted(trained.run.rglob("*.safetensors")) == before
