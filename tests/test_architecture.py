"""The house: imports run downwards, there are no cycles of any kind, and the light side never meets torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"art_langgraph": ROOT / "art_langgraph", "art_mcp": ROOT / "art_mcp"}
PACKAGES["art_backends"] = ROOT / "backends" / "art_backends"

# The floor of a room; a module imports from lower floors, from its own room, and from those in SIDEWAYS.
FLOORS = {
    "errors": 1,
    "problems": 1,
    "trajectories": 1,
    "config": 1,
    "arguments": 2,
    "store": 2,
    "client": 2,
    "capture": 2,
    "rewards": 2,
    "traces": 2,
    "tracking": 2,
    "models": 2,
    "scenarios": 2,
    "report": 2,
    "display": 2,
    "waiting": 2,
    "child": 2,
    "functions": 2,
    "redaction": 2,
    "loop": 3,
    "rollouts": 3,
    "command": 3,
    "batches": 3,
    "stragglers": 2,
    "failures": 2,
    "stacks": 2,
    "watchdog": 2,
    "exclusion": 2,
    "playing": 3,
    "checks": 3,
    "sft": 3,
    "summary": 3,
    "proxy": 3,
    "training": 3,
    "engines": 3,
    "backend": 4,
    "model": 4,
    "server": 4,
    "worker": 4,
    "cli": 5,
    "cli_folder": 5,
    "cli_rollouts": 5,
    "cli_versions": 5,
    "cli_train": 5,
    "cli_forget": 5,
    "cli_vllm": 5,
    "art_langgraph": 5,
    "art_mcp": 5,
}
SIDEWAYS = {("config", "errors"), ("config", "problems"), ("problems", "errors"), ("trajectories", "errors")}
SIDEWAYS |= {("model", "backend")}
SIDEWAYS |= {("loop", "rollouts"), ("loop", "summary"), ("summary", "rollouts")}
SIDEWAYS |= {("cli", "cli_versions"), ("cli", "cli_rollouts"), ("cli", "cli_train"), ("cli", "cli_forget")}
SIDEWAYS |= {("cli", "cli_vllm")}
SIDEWAYS |= {("cli", "cli_folder"), ("cli_versions", "cli_folder"), ("cli_rollouts", "cli_folder")}
SIDEWAYS |= {("cli_forget", "cli_folder")}
SIDEWAYS |= {("failures", "capture"), ("failures", "functions"), ("store", "redaction")}
# the loop's own helpers
SIDEWAYS |= {("loop", "playing"), ("loop", "checks"), ("playing", "batches"), ("playing", "rollouts")}
SIDEWAYS |= {("playing", "checks"), ("checks", "rollouts"), ("checks", "summary")}
SIDEWAYS |= {("batches", "rollouts"), ("batches", "summary")}
HEAVY = {"torch", "transformers", "vllm", "peft", "safetensors", "litellm"}
LIGHT_ROOMS = {"art_langgraph", "art_mcp", "backend", "model", "loop", "capture", "client", "server", "proxy", "store"}
LIGHT_ROOMS |= {"errors", "trajectories", "config", "rewards", "traces", "tracking", "models", "scenarios"}
LIGHT_ROOMS |= {"report", "display", "cli", "waiting", "rollouts", "summary", "child", "batches", "sft"}
LIGHT_ROOMS |= {
    "command",
    "functions",
    "cli_train",
    "cli_folder",
    "cli_rollouts",
    "cli_versions",
    "cli_vllm",
    "arguments",
    "problems",
}
LIGHT_ROOMS |= {"stragglers", "playing", "checks", "stacks", "watchdog", "failures"}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = file
    return found


MODULES = modules()


def imports(name: str, file: Path) -> Iterator[str]:
    """Every module that is imported anywhere in the file: at import time, under TYPE_CHECKING, inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            for alias in node.names:  # a module of the package, or a name in it
                module = f"{node.module}.{alias.name}"
                yield module if module in MODULES else node.module


def room(module: str) -> str:
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "art_backends" else package


def own_imports() -> dict[str, set[str]]:
    return {name: {one for one in imports(name, file) if one in MODULES} for name, file in MODULES.items()}


def test_every_room_has_a_floor() -> None:
    rooms = {room(name) for name in MODULES} - {""}
    assert rooms <= set(FLOORS), f"rooms without a floor: {sorted(rooms - set(FLOORS))}"


def test_imports_run_downwards() -> None:
    wrong = []
    for name, targets in own_imports().items():
        for target in targets:
            here, there = room(name), room(target)
            if not here or not there or here == there or (here, there) in SIDEWAYS:
                continue
            if FLOORS[there] >= FLOORS[here]:
                wrong.append(f"{name} imports {target}")
    assert not wrong, wrong


def test_the_doors_never_import_server_or_worker() -> None:
    wrong = []
    for name, targets in own_imports().items():
        if name.startswith(("art_langgraph", "art_mcp")):
            wrong += [f"{name} imports {target}" for target in targets if room(target) in {"server", "worker"}]
    assert not wrong, wrong


def test_no_cycles_of_any_kind() -> None:
    graph = own_imports()
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name in done:
            return
        for target in sorted(graph[name] - {name}):
            visit(target, (*path, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_light_rooms_never_import_torch() -> None:
    wrong = []
    for name, file in MODULES.items():
        if room(name) in LIGHT_ROOMS or not room(name):
            wrong += [f"{name} imports {one}" for one in imports(name, file) if one.partition(".")[0] in HEAVY]
    assert not wrong, wrong


@pytest.mark.parametrize("module", ["art_langgraph", "art_backends.backend", "art_backends.cli", "art_backends.loop"])
def test_importing_the_light_side_loads_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_says_what_it_is_for() -> None:
    wrong = [name for name, file in MODULES.items() if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not wrong, f"modules without a docstring: {wrong}"
