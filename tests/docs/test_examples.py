"""What the pages show exists: code, commands, options, settings, files, names. A renamed thing makes its page fail."""

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from art_backends.cli import _parser as art_backends
from art_backends.config import TrainConfig, make_config

from art_langgraph.cli import _parser as art_langgraph

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CLIS = {"art-langgraph": art_langgraph, "art-backends": art_backends}
YOURS = {"my_app", "my_rewards"}  # modules of the reader's
SETTINGS = set(TrainConfig.model_fields)
THEIRS = {"astream_events", "create_agent"}  # names of LangChain's that pages speak of
SHELL = {"sh", "bash", "console", "shell"}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    runnable: bool  # ```python run
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; a fence that is never closed is an error."""
    found: list[Block] = []
    start: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif start is None:
            start, lines = (number, line.removeprefix("```").strip()), []
        else:
            language, _, rest = start[1].partition(" ")
            found.append(Block(page.name, start[0], language, rest == "run", "\n".join(lines)))
            start = None
    assert start is None, f"{page.name}:{start}: the fence is not closed"
    return found


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words, without comments, variables set in front, and substitutions."""
    joined = text.replace("\\\n", " ")
    joined = re.sub(r"\$\([^)]*\)", "SUBSTITUTED", joined)
    found = []
    for line in joined.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [(block.where, words) for block in BLOCKS if block.language in SHELL for words in commands(block.text)]
# `art-backends status` in running text is a command too
COMMANDS += [
    (page.name, shlex.split(span))
    for page in PAGES
    for span in re.findall(r"`((?:art-langgraph|art-backends|make|python) [^`\n]+)`", prose(page))
]


def check_command(words: list[str]) -> None:
    """AssertionError if the command, an option of it, or a file that it names does not exist."""
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program in CLIS:
        parser = CLIS[program]()
        complete = [name for name in arguments if name != "…"]
        if len(complete) == 1 and complete[0] in subcommands(parser):
            return  # named without arguments, as in `art-backends status`
        try:
            options = parser.parse_args(complete)
        except SystemExit as left:
            assert left.code == 0, f"{shlex.join(words)} is refused"  # noqa: PT017 - a usage error is the failure
            return
        given = {name: value for name, value in vars(options).items() if name in SETTINGS}
        make_config(given, source=shlex.join(words))
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets), f"make has no target {arguments}"
    elif program == "python":
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]), f"no module {arguments[1]}"
        else:
            check_script(ROOT / arguments[0], arguments[1:])
    elif program == "pip":
        assert arguments[0] == "install"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"\[([a-z,]+)\]", " ".join(arguments)):
            assert set(named.split(",")) <= set(extras), f"pyproject.toml has no extra {named}"
    else:
        pytest.fail(f"{program}: nothing here knows how to check it")


def check_script(script: Path, arguments: list[str]) -> None:
    assert script.is_file(), f"there is no {script}"
    source = script.read_text()
    for option in (word for word in arguments if word.startswith("--")):
        assert f'"{option}"' in source, f"{script.name} has no option {option}"


def subcommands(parser: argparse.ArgumentParser) -> set[str]:
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name for names in choices for name in names}


def check_python(code: str) -> None:
    """AssertionError (or SyntaxError) if the code does not compile, or names what the packages do not have."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names if alias.name.partition(".")[0] not in YOURS):
                importlib.import_module(name)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] not in YOURS:
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                known = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                assert known, f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "art_langgraph":
            assert hasattr(importlib.import_module("art_langgraph"), node.attr), f"art_langgraph has no {node.attr}"
        elif isinstance(node, ast.Call):
            check_keywords(node)


def check_keywords(call: ast.Call) -> None:
    """Keywords of train, atrain and TrainConfig are parameters or settings."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in ("train", "atrain", "TrainConfig"):
        return
    known = set(SETTINGS)
    if name != "TrainConfig":
        known |= set(inspect.signature(importlib.import_module("art_langgraph").train).parameters)
    given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    assert given <= known, f"{name}() has no {sorted(given - known)}"
    if name == "TrainConfig":
        TrainConfig(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg})


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_python_names_what_exists(block):
    check_python(block.text)


@pytest.mark.parametrize("block", [block for block in PYTHON if block.runnable], ids=lambda block: block.where)
def test_runnable_python_runs(block, tmp_path):
    file = tmp_path / "example.py"
    file.write_text(block.text)
    done = subprocess.run([sys.executable, file], check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[f"{w} {' '.join(c[:3])}" for w, c in COMMANDS])
def test_commands_exist(where, words):
    check_command(words)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "toml"], ids=lambda block: block.where
)
def test_toml_is_accepted(block):
    data = tomllib.loads(block.text)
    make_config(data.get("art", data))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: no heading for {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_repository_exist(page):
    for path in re.findall(r"`((?:recipes|docs|tests|benchmarks|backends|\.ci|\.github)/[^`*\s]*)`", prose(page)):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


SOURCE = "\n".join(
    file.read_text()
    for folder in ("art_langgraph", "backends", "recipes", "benchmarks")
    for file in sorted((ROOT / folder).rglob("*.py"))
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_running_text_are_names_of_the_code(page):
    """`group_size`, `--held-out`, `kl_coefficient = 0.1`: each must still be called so somewhere in the sources."""
    unknown = []
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span) and span not in THEIRS and not re.search(rf"\b{span}\b", SOURCE):
            unknown.append(span)
        option = re.fullmatch(r"--([a-z-]+)( .*)?", span)
        if option and not known_option(option[1]):
            unknown.append(span)
        setting = re.match(r"([a-z_]+) ?= ?[^=]", span)
        if setting and setting[1] not in SETTINGS:
            unknown.append(span)
    assert not unknown, f"{page.name}: {unknown}"


def known_option(name: str) -> bool:
    return name.removeprefix("no-").replace("-", "_") in SETTINGS or f'"--{name}"' in SOURCE


def test_the_settings_page_is_what_the_class_says():
    page = runpy.run_path(str(ROOT / "docs" / "configuration.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, "run: python docs/configuration.py"
    assert [row for row in SETTINGS if f"\n| `{row}` |" not in page] == []


def test_the_table_of_secrets_is_what_is_looked_for():
    file = ROOT / "docs" / "privacy.md"
    assert runpy.run_path(str(ROOT / "docs" / "privacy.py"))["page"](file.read_text()) == file.read_text()


def test_variables_of_the_environment_example_are_read():
    for name in re.findall(r"^#? ?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE):
        assert name in SOURCE or name.startswith("OPENAI_"), f".env.example: nothing reads {name}"


def test_the_two_commands_stand_in_the_readme():
    assert {"make demo", "make test"} <= {" ".join(words) for where, words in COMMANDS if where.startswith("README")}
    assert any(block.page == "README.md" for block in PYTHON)


@pytest.mark.parametrize(
    "words",
    [
        "art-langgraph train my_app:graph --scenarios a --reward b:c --group-sizes 3",
        "art-langgraph train my_app:graph --scenarios a --reward b:c --group-size 1",
        "art-backends shows",
        "art-backends rollouts show ID --foldr x",
        "make dmo",
        "python recipes/quickstart/application.py",
        "python benchmarks/learning.py --jsn x",
        "pip install '.[langchain]'",
    ],
)
def test_a_wrong_command_is_found(words, capsys):
    with pytest.raises((AssertionError, ValueError)):
        check_command(shlex.split(words))


@pytest.mark.parametrize(
    "code",
    [
        "import art_langraph",
        "from art_langgraph import Runner",
        "import art_langgraph\nart_langgraph.trains",
        "import art_langgraph\nart_langgraph.train(g, scenarios=s, reward=r, groupsize=3)",
        "TrainConfig(rank=0)",
        "print(",
    ],
)
def test_wrong_code_is_found(code):
    with pytest.raises((AssertionError, ImportError, SyntaxError, ValueError)):
        check_python(code)
