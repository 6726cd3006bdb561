"""The command line: options, words, exit codes. The run itself is taken over where no server is wanted."""

import json
import subprocess
import sys

import pytest
from art_backends.config import TrainConfig
from art_backends.functions import load_function
from art_backends.report import Report
from art_backends.scenarios import load

from art_langgraph import cli
from art_langgraph.cli import main


@pytest.fixture
def app(tmp_path, monkeypatch):
    """A folder with an app, as a user has it; the current directory."""
    (tmp_path / "cli_app.py").write_text("class Graph:\n    async def ainvoke(self, value, config=None): ...\n")
    (tmp_path / "cli_broken.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "cli_needs.py").write_text("import a_module_that_is_missing\n")
    (tmp_path / "cli_leaves.py").write_text("import sys\n\n\ndef main():\n    sys.exit('no key')\n\n\nmain()\n")
    (tmp_path / "cli_rewards.py").write_text("def score(run):\n    return 1.0\n\nNUMBER = 5\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "one"}\n{"question": "two"}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": "one"}\n{"question": \n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


BASE = ["train", "cli_app:Graph", "--scenarios", "tasks.jsonl", "--reward", "cli_rewards:score"]


@pytest.fixture
def taken(monkeypatch):
    """What train was called with."""
    calls = []

    def train(graph, **settings):
        calls.append((graph, settings))
        return Report("policy", "base", version="policy@2", base_success=0.1, trained_success=0.9, held_out=9)

    monkeypatch.setattr(cli, "train", train)
    return calls


def test_every_setting_is_an_option(app, taken, capsys):
    (app / "art.toml").write_text("steps = 9\nrank = 4\n")
    options = [
        *BASE,
        "--held-out",
        "0.25",
        "--config",
        "art.toml",
        "--steps",
        "3",
        "--target-modules",
        "q_proj",
        "--seed",
    ]
    assert main([*options, "7", "--no-scale-rewards", "--to-input", "cli_rewards:score"]) == 0
    ((graph, settings),) = taken
    config = settings["config"]
    assert (config.steps, config.rank, config.seed, config.target_modules) == (3, 4, 7, ["q_proj"])
    assert graph == "cli_app:Graph"
    assert settings["held_out"] == 0.25
    assert settings["reward"] is settings["to_input"]
    said = capsys.readouterr().out
    assert "0.100 before, 0.900 after" in said
    assert "art-backends serve --folder" in said


def test_held_out_may_be_a_file(app, taken):
    assert main([*BASE, "--held-out", "held_out.jsonl"]) == 0
    assert taken[0][1]["held_out"] == "held_out.jsonl"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({2: "--scenarios", 3: "bad.jsonl"}, "art-langgraph: bad.jsonl, line 2: not valid JSON"),
        ({3: "nothing.jsonl"}, "nothing.jsonl: cannot be read"),
        ({5: "cli_rewards"}, "--reward cli_rewards: give module:function"),
        ({5: "cli_rewards:scores"}, "--reward cli_rewards:scores: cli_rewards has no 'scores'; did you mean score?"),
        ({5: "cli_rewards:NUMBER"}, "this is a int, not a function"),
        ({5: "no_rewards:score"}, "there is no module 'no_rewards'"),
        ({5: "no_rewards.py:score"}, "there is no file"),
        ({1: "no_such_app:graph"}, "no module 'no_such_app'"),
        ({1: "cli_rewards:NUMBER"}, "not a graph"),
    ],
)
def test_what_is_wrong_is_one_clear_line_and_code_2(app, capsys, changes, words):
    arguments = [changes.get(index, value) for index, value in enumerate(BASE)]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("art-langgraph: ")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("option", "module"),
    [
        (1, "cli_broken:graph"),
        (5, "cli_broken:score"),
        (5, "cli_needs:score"),
        (1, "cli_leaves:graph"),
        (5, "cli_leaves:score"),
        (5, "cli_leaves.py:score"),
    ],
)
def test_an_error_in_the_app_comes_with_its_own_traceback(app, capsys, option, module):
    arguments = [module if index == option else value for index, value in enumerate(BASE)]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    name = module.partition(":")[0].removesuffix(".py")
    assert f'{name}.py", line' in said
    last = said.rstrip().splitlines()[-1]
    wanted = {
        "cli_broken": "JSONDecodeError",
        "cli_needs": "No module named 'a_module",
        "cli_leaves": "SystemExit: no key",
    }
    assert wanted[name] in last
    assert "art_langgraph/" not in said
    assert "importlib" not in said


def test_ctrl_c_is_130(app, monkeypatch, capsys):
    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "train", train)
    assert main(BASE) == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "command", "words"),
    [
        ([], "", "the following arguments are required: COMMAND"),
        (["trian"], "", "argument COMMAND: 'trian' is none of train, inspect, check; did you mean train?"),
        (["train"], " train", "the following arguments are required: MODULE:ATTR, --scenarios, --reward"),
        ([*BASE[:-2], "--rewrd", "x"], " train", "unrecognized arguments: --rewrd; did you mean --reward?"),
        ([*BASE, "--steps"], " train", "argument --steps: expected one argument"),
        ([*BASE, "--stepz", "3"], " train", "unrecognized arguments: --stepz; did you mean --steps?"),
        (
            ["check", *BASE[1:4], "--rank", "4", "--steps=3"],
            " check",
            "--steps has no effect on this command: leave it out",
        ),
        (["check", *BASE[1:]], " check", "--reward has no effect on this command: leave it out"),
    ],
)
def test_usage_errors(arguments, command, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"art-langgraph{command}: {words}\nsee `art-langgraph{command} --help`\n"


def test_a_wrong_value_is_named(app, capsys):
    assert main([*BASE, "--steps", "many"]) == 2
    assert capsys.readouterr().err == "art-langgraph: --steps must be a whole number, not 'many'\n"


def test_check_offers_what_one_rollout_goes_by(capsys):
    with pytest.raises(SystemExit) as left:
        main(["check", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert {name for name in TrainConfig.model_fields if f"--{name.replace('_', '-')} " in said} == cli.CHECKED


GRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4o-mini", api_key="k")


def agent(state):
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState).add_node("agent", agent).add_node("other", lambda state: {})
graph = graph.add_edge(START, "agent").add_edge("agent", "other").compile()
"""


def test_inspect_shows_what_would_train(app, capsys):
    (app / "cli_graph.py").write_text(GRAPH)
    assert main(["inspect", "cli_graph:graph", "--nodes", "agent", "--models", "gpt-4o-mini"]) == 0
    said = capsys.readouterr()
    assert "nodes that train: agent\n" in said.out
    assert said.err == ""
    assert main(["inspect", "cli_graph:graph", "--nodes", "other", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["trained"], found["models"][0]["trained"]) == (["other"], False)
    assert said.err.startswith(
        "art-langgraph: warning: nodes: no model of the policy was found in other, only in agent"
    )


@pytest.mark.parametrize("command", ["inspect", "check", "train"])
def test_names_that_the_graph_does_not_have(app, capsys, command, monkeypatch):
    """Before anything is started, whatever the command."""
    (app / "cli_graph.py").write_text(GRAPH)
    arguments = {"inspect": [], "check": BASE[2:4], "train": BASE[2:]}[command]
    assert main([command, "cli_graph:graph", *arguments, "--nodes", "agnt"]) == 2
    assert "by the name agnt; did you mean agent? There are: agent, other\n" in capsys.readouterr().err
    assert main([command, "cli_graph:graph", *arguments, "--models", "gpt-4o"]) == 2
    assert "by the name gpt-4o; did you mean gpt-4o-mini? There are: gpt-4o-mini\n" in capsys.readouterr().err
    assert not (app / ".art").exists()


def test_check_names_the_ids_there_are(app, capsys):
    check = ["check", "cli_app:Graph", "--scenarios", "tasks.jsonl", "--scenario"]
    assert main([*check, "3"]) == 2
    said = capsys.readouterr().err
    first, second = (scenario.id for scenario in load("tasks.jsonl"))
    assert f"--scenario 3: tasks.jsonl has no scenario of that id. There are 2: {first}, {second} (a scenario" in said
    (app / "tasks.jsonl").write_text("".join(f'{{"id": "task-{number}"}}\n' for number in range(1, 9)))
    assert main([*check, "task_2"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("that id; did you mean task-2? There are 8: task-1, task-2, task-3, task-4, task-5, …\n")


def test_a_held_out_number_that_is_no_share(app, capsys):
    for value in ("20", "0", "-1", "nan"):
        assert main([*BASE, f"--held-out={value}"]) == 2
        assert "a share between 0 and 1 (0.2 is a fifth) or a file of scenarios" in capsys.readouterr().err


def test_functions_by_file_and_by_dotted_name(app):
    assert load_function("cli_rewards.py:score", "--reward")(None) == 1.0
    assert load_function("json:decoder.JSONDecoder", "--reward")


def test_the_process_ends_even_if_a_thread_of_the_app_hangs(app):
    code = """
import sys, threading
sys.path[:0] = PATH
from art_langgraph import cli
def train(*_, **__):
    threading.Thread(target=threading.Event().wait).start()
    raise KeyboardInterrupt
cli.train = train
cli._LINGER = 0.1
sys.argv[1:] = ["train", "cli_app:Graph", "--scenarios", "tasks.jsonl", "--reward", "cli_rewards:score"]
sys.exit(cli.main())
""".replace("PATH", repr(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60, cwd=app
    )
    assert done.returncode == 130, done.stderr
