"""Whole runs: the real loop, server and worker on a random language model of 40 thousand weights, made on the spot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SETTINGS: dict[str, Any] = {
    "steps": 3,
    "groups_per_step": 2,
    "group_size": 3,
    "rank": 2,
    "alpha": 4.0,
    "threads": 1,
    "learning_rate": 1e-2,
}

APP = '''
"""An ordinary LangGraph app: a model with two tools, asked twice per turn."""
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def stock(product: str) -> str:
    """Pieces in stock."""
    return "7"


@tool
def arrival(order: str) -> str:
    """Day of arrival."""
    return "Monday"


TOOLS = [stock, arrival]
model = ChatOpenAI(model="gpt-4o-mini", temperature=0, max_completion_tokens=8).bind_tools(TOOLS)


async def agent(state: MessagesState) -> dict:
    first = await model.ainvoke(state["messages"])
    if first.tool_calls:
        return {"messages": [first]}
    more = HumanMessage("Go on.")
    return {"messages": [first, more, await model.ainvoke([*state["messages"], first, more])]}


builder = StateGraph(MessagesState)
builder.add_node("agent", agent)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "agent")
builder.add_conditional_edges("agent", tools_condition)
builder.add_edge("tools", "agent")
graph = builder.compile().with_config(recursion_limit=6)

if __name__ == "__main__":
    import asyncio
    import sys

    answer = asyncio.run(graph.ainvoke({"messages": [HumanMessage(sys.argv[1])]}))
    print(ascii(answer["messages"][-1].content))
'''

REWARDS = '''
"""Share of letters in all that the agent said; something that a random model varies on."""
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
LOCK = threading.Lock()
scored = 0


def said(run):
    return "".join(m.get("content") or "" for m in (run.output or {}).get("messages", []) if m["role"] == "assistant")


def score(run):
    text = said(run)
    letters = sum(character.isascii() and character.isalpha() for character in text)
    return {"reward": letters / (len(text) or 1), "success": letters * 2 > len(text)}


def held(run):
    """As score; but once the file `hold` is there, only as many runs as it says are scored, and the next one waits."""
    global scored
    with LOCK:
        try:
            limit = int((HERE / "hold").read_text() or -1)
        except FileNotFoundError:
            limit = -1
        wait = 0 <= limit <= scored
        scored += 1
    if wait:
        (HERE / "waiting").touch()
    while wait and (HERE / "hold").exists():
        time.sleep(0.02)
    return score(run)
'''


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML's control tokens, learned from what the tests say."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    hermes = Path(__file__).parents[2] / "backends/art_backends/engines/embedded/hermes.jinja"
    tokenizer.train_from_iterator(
        [hermes.read_text(encoding="utf-8"), APP, REWARDS],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    fast.chat_template = template
    return fast


def make_model(folder: Path, template: str | None = CHATML, spread: float = 0.1) -> Path:
    """A random Llama in a folder, as a hub would hold it."""
    tokenizer = make_tokenizer(template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=4096,
                initializer_range=spread,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain"), template=None)


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Project:
    """A user's folder with an app, rewards and scenarios; the run folder is ``run`` in it."""

    path: Path
    model: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.path / "run"

    def environment(self, **more: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "LANGCHAIN"))}
        kept |= {"OPENAI_API_KEY": "a-fake-key", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        return kept | more

    def start(self, program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start one of our commands, or ``python``, in the project's folder."""
        command = sys.executable if program == "python" else str(Path(sysconfig.get_path("scripts")) / program)
        process = subprocess.Popen(
            [command, *arguments],
            cwd=self.path,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def call(self, program: str, *arguments: str, seconds: float = 100, **environment: str) -> Ended:
        """One of our commands to its end."""
        return ended(self.start(program, *arguments, **environment), seconds)

    def training(self, *more: str, graph: str = "my_app:graph", reward: str = "my_rewards:score") -> list[str]:
        """Arguments of ``art-langgraph train``; what comes later on a command line wins."""
        found = ["train", graph, "--scenarios", "tasks.jsonl", "--reward", reward]
        found += ["--base-model", str(self.model), "--folder", str(self.run)]
        for name, value in SETTINGS.items():
            found += ["--" + name.replace("_", "-"), str(value)]
        return [*found, *more]

    def processes(self) -> dict[int, str]:
        """Processes that name this run folder, by pid: the server and the worker."""
        said = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=True).stdout
        found = {}
        for line in said.splitlines():
            pid, _, command = line.strip().partition(" ")
            if str(self.run) in command and "art_backends" in command:
                found[int(pid)] = command
        return found

    def gone(self, seconds: float = 30) -> None:
        """Wait until no server and no worker of this folder is left."""
        wait(lambda: not self.processes(), seconds, lambda: f"left over: {self.processes()}")

    def ask(self, path: str) -> Any | None:
        """An answer of the running server's control API; None while it does not answer."""
        try:
            url = json.loads((self.run / "server.json").read_text())["url"]
            token = (self.run / "admin.token").read_text().strip()
            with httpx.Client(trust_env=False, timeout=10) as client:
                reply = client.get(f"{url}/control/v1{path}", headers={"authorization": f"Bearer {token}"})
        except (OSError, ValueError, httpx.TransportError):
            return None
        return reply.json() if reply.is_success else None

    def report(self) -> dict[str, Any]:
        return json.loads((self.run / "report.json").read_text())  # type: ignore[no-any-return]

    def state(self, version: int) -> dict[str, Any]:
        return json.loads((self.run / f"versions/policy@{version}/state.json").read_text())  # type: ignore[no-any-return]


def ended(process: subprocess.Popen[str], seconds: float = 100) -> Ended:
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, err)


def wait(what: Callable[[], Any], seconds: float, otherwise: Callable[[], str] = lambda: "") -> Any:
    """What other processes do cannot be awaited: look until it is true, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what} {otherwise()}"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="session")
def waiting() -> Callable[..., Any]:
    return wait


@pytest.fixture(scope="session")
def to_end() -> Callable[..., Ended]:
    return ended


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    return SETTINGS


def fill(path: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "my_app.py").write_text(APP)
    (path / "my_rewards.py").write_text(REWARDS)
    tasks = [{"id": f"t{number}", "messages": [{"role": "user", "content": f"Say {number}."}]} for number in range(5)]
    (path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def _project(path: Path, model: Path) -> Iterator[Project]:
    fill(path)
    made = Project(path, model)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)
    made.gone(60)


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Iterator[Project]:
    """A project of this test's own; in the end nothing that it started may be left."""
    yield from _project(tmp_path / "project", model)


@pytest.fixture(scope="module")
def shared_project(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Project]:
    """One for all tests of a module."""
    yield from _project(tmp_path_factory.mktemp("shared") / "project", model)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Project]:
    """A project after ``art-langgraph train`` of three steps with held-out scenarios, by its flags."""
    for project in _project(tmp_path_factory.mktemp("trained") / "project", model):
        done = project.call("art-langgraph", *project.training("--held-out", "0.2"))
        assert done.code == 0, done.err
        assert "3 steps, 18 rollouts (0 excluded)" in done.out
        yield project


@pytest.fixture(scope="module")
def served(trained: Project) -> Iterator[tuple[Project, str]]:
    """(project, url) of the trained project, served by the command."""
    process = trained.start("art-backends", "serve", "--folder", "run", "--port", "0", "--threads", "1")
    file = trained.run / "server.json"
    wait(lambda: file.exists() or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()[1]
    yield trained, json.loads(file.read_text())["url"]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert f"{json_url(out)}/v1" in out
    assert not file.exists()
    assert not trained.processes()


def json_url(out: str) -> str:
    """The address in the first line of what the command says."""
    return out.split(" at ", 1)[1].split("/v1", 1)[0].strip()
