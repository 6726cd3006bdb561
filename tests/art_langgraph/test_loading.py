"""Finding the user's graph, and clear words where there is none."""

import os
import sys
import textwrap

import pytest
from art_backends.errors import GraphError

from art_langgraph.loading import load_graph

GRAPH = """
from typing import TypedDict
from langgraph.graph import START, StateGraph

class State(TypedDict, total=False):
    n: int

def build(config=None):
    return StateGraph(State).add_node("a", lambda state: {"n": state["n"] + 1}).add_edge(START, "a")

graph = build().compile()
"""


@pytest.fixture
def app(tmp_path, monkeypatch):
    """Write app.py, in the current folder; modules and paths are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)

    def write(text="", name="an_app.py", graph=GRAPH):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(graph + textwrap.dedent(text))
        return path

    yield write
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


async def answers(loaded):
    async with loaded:
        return (await loaded.ainvoke({"n": 1}))["n"]


@pytest.mark.parametrize("spec", ["an_app:graph", "an_app.py:graph", "an_app", "./an_app.py"])
async def test_modules_and_files(app, spec):
    app()
    assert await answers(load_graph(spec)) == 2


async def test_a_file_in_a_package_and_two_files_of_one_name(app):
    app(name="pkg/__init__.py", graph="")
    app("from .an_app import graph as other", name="pkg/sub.py", graph="")
    app(name="pkg/an_app.py")
    assert await answers(load_graph("pkg/sub.py:other")) == 2
    first = load_graph(str(app(name="one/same.py")) + ":graph")
    second = load_graph(str(app("name = 'two'", name="two/same.py")) + ":graph")
    assert first.graph is not second.graph
    assert load_graph(str(app(name="one/same.py")) + ":graph").graph is first.graph


FACTORIES = """
    import contextlib

    closed = []

    def plain():
        return graph

    def with_config(config):
        return graph if config == {"configurable": {}} else None

    async def later():
        return build()

    @contextlib.contextmanager
    def opened():
        yield graph
        closed.append("sync")

    @contextlib.asynccontextmanager
    async def aopened():
        yield graph
        closed.append("async")

    def wrong():
        return 42

    def fails():
        raise RuntimeError("no database")

    def leaves():
        raise SystemExit("no key")

    @contextlib.contextmanager
    def never_opened():
        raise RuntimeError("no pool")
        yield graph

    def needs(a, b):
        return graph

    def yields():
        yield graph

    async def ayields():
        yield graph

    uncompiled = build()
    number = 42
    from langchain_core.language_models.fake_chat_models import FakeListChatModel
    model = FakeListChatModel(responses=["x"])
"""


@pytest.mark.parametrize("name", ["plain", "with_config", "later", "opened", "aopened", "uncompiled", "build"])
async def test_factories(app, name):
    app(FACTORIES)
    loaded = load_graph(f"an_app:{name}")
    assert await answers(loaded) == 2
    module = sys.modules["an_app"]
    assert module.closed == {"opened": ["sync"], "aopened": ["async"]}.get(name, [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong", "returned int 42, which is not a graph"),
        ("fails", "RuntimeError: no database"),
        ("leaves", "SystemExit: no key"),
        ("never_opened", "RuntimeError: no pool"),
        ("needs", "needs 2 arguments (a, b)"),
        ("yields", "A function that yields its graph needs @contextlib.contextmanager."),
        ("ayields", "A function that yields its graph needs @contextlib.asynccontextmanager."),
    ],
)
async def test_factories_that_make_no_graph(app, name, words):
    path = app(FACTORIES)
    with pytest.raises(GraphError) as caught:
        await load_graph(f"an_app:{name}").open()
    told = str(caught.value)
    assert words in told
    assert {line.split('"')[1] for line in told.splitlines() if line.startswith("  File ")} <= {str(path)}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("an_app:number", "int 42, not a graph"),
        ("an_app:number", "an_app has these graphs: graph, uncompiled"),
        ("an_app:model", "not a graph"),
        ("an_app:missing", "no attribute 'missing'; it has these graphs: graph, uncompiled"),
        ("an_app", "these graphs: graph, uncompiled. Name one"),
        ("no_such_app:graph", "no module 'no_such_app'"),
        ("no/such/file.py:graph", "There is no file"),
        ("not a module:graph", "neither a module's name nor a .py file"),
        ("langgraph.json", "cannot be read"),
    ],
)
def test_what_is_no_graph_is_named(app, spec, words):
    app(FACTORIES)
    with pytest.raises(GraphError) as caught:
        load_graph(spec)
    assert words in str(caught.value)


def test_an_object_that_is_no_graph():
    with pytest.raises(GraphError, match="dict"):
        load_graph({"a": 1})

    async def make():
        return None

    made = make()
    with pytest.raises(GraphError, match="Give the function itself, not what it returns when it is called"):
        load_graph(made)
    made.close()
    assert load_graph(make).name == "make"


@pytest.mark.parametrize("spec", ["an_app:graph", "an_app.py:graph"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import a_package_that_is_missing", "No module named 'a_package_that_is_missing'"),
        ("def inner():\n    raise ValueError('bad setting')\ninner()", "ValueError: bad setting"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit('usage: app')", "SystemExit: usage: app"),
        ("try:\n    import a_missing_one\nexcept ImportError:\n    raise ValueError('install it')", "install it"),
        ("try:\n    import a_missing_one\nexcept ImportError as e:\n    raise SystemExit('install it') from e", "it"),
        ("import importlib\nimportlib.import_module('a_missing_one')", "No module named 'a_missing_one'"),
        ("raise ExceptionGroup('both', [ValueError('one'), ValueError('two')])", "ValueError: two"),
    ],
)
def test_the_apps_own_traceback_is_shown(app, spec, text, words):
    path = app(text, graph="")
    with pytest.raises(GraphError) as caught:
        load_graph(spec)
    told = str(caught.value)
    assert words in told
    assert str(path) in told
    assert {line.split('"')[1] for line in told.splitlines() if "File " in line} == {str(path)}
    assert "an_app" not in sys.modules


async def test_langgraph_json(app, tmp_path, monkeypatch):
    monkeypatch.delenv("ART_TEST_SETTING", raising=False)
    app("import os, helper_of_app\nassert os.environ['ART_TEST_SETTING'] == 'on'", name="src/an_app.py")
    app(graph="", name="src/helper_of_app.py")
    (tmp_path / ".env").write_text("# settings\nexport ART_TEST_SETTING='on'\n")
    project = '{"dependencies": ["./src"], "env": ".env", "graphs": {"agent": "./src/an_app.py:graph"}}'
    (tmp_path / "langgraph.json").write_text(project)
    assert await answers(load_graph("langgraph.json")) == 2
    assert await answers(load_graph(tmp_path / "langgraph.json")) == 2
    assert await answers(load_graph("langgraph.json:agent")) == 2
    with pytest.raises(GraphError, match="has these graphs: agent"):
        load_graph("langgraph.json:other")
    monkeypatch.delenv("ART_TEST_SETTING")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("ART_TEST_SETTING=on # the key", "on"),
        ("ART_TEST_SETTING='on # it' # the key", "on # it"),
        ('export ART_TEST_SETTING = "on=1"', "on=1"),
        ("ART_TEST_SETTING=a#b", "a#b"),
        ("ART_TEST_SETTING= # nothing", ""),
        ("ART_TEST_SETTING='half", "'half"),
    ],
)
def test_an_env_file_of_langgraph_json(app, tmp_path, monkeypatch, line, value):
    monkeypatch.setattr(os, "environ", {})
    app()
    (tmp_path / ".env").write_text(line + "\n")
    (tmp_path / "langgraph.json").write_text(
        '{"dependencies": null, "env": ".env", "graphs": {"a": "./an_app.py:graph"}}'
    )
    load_graph("langgraph.json")
    assert os.environ == {"ART_TEST_SETTING": value}


@pytest.mark.parametrize(
    ("project", "words"),
    [
        ("[]", "names no graphs"),
        ('{"graphs": {"a": 5}}', "the graph a is '5', not FILE:NAME"),
        ('{"graphs": {"a": "./an_app.py:graph"}, "dependencies": 5}', "dependencies must be a list, not int 5"),
        ("{", "is not JSON"),
    ],
)
def test_a_langgraph_json_that_is_broken(app, tmp_path, project, words):
    app()
    (tmp_path / "langgraph.json").write_text(project)
    with pytest.raises(GraphError, match=words):
        load_graph("langgraph.json")


def test_a_factory_must_be_opened_first(app):
    app(FACTORIES)
    with pytest.raises(GraphError, match="not been opened"):
        _ = load_graph("an_app:plain").graph
