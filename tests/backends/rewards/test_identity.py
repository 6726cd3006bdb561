"""What changes a reward's identity, and what does not; the same in every process."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from art_backends.rewards.identity import change, identity

BASE = """
    import re
    import json as codec
    from helpers import letters

    WEIGHTS = {"right": 0.8, "form": [0.1, 0.1]}
    PATTERN = re.compile("[a-z]+")
    seen = 0

    def part(text):
        return 0.5 if PATTERN.search(text) else 0.0

    class Judge:
        limit = 3

        def __call__(self, run):
            return part(run.output) + self.limit

    def score(run, scale=1.0):
        # a comment
        global seen
        seen += 1
        return {"reward": scale * part(run.output) * WEIGHTS["right"] + letters(run.output) + len(codec.dumps(""))}
"""
HELPERS = """
    def letters(text):
        return sum(character.isalpha() for character in text)
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A module of a user's, by its source, with ``helpers`` beside it."""

    def make(source: str, helpers: str = HELPERS) -> ModuleType:
        modules = []
        for name, text in (("helpers", helpers), ("my_rewards", source)):
            module = ModuleType(name)
            module.__file__ = str(tmp_path / f"{name}.py")
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(dedent(text), module.__file__, "exec"), vars(module))
            modules.append(module)
        return modules[1]

    return make


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale *", "2 * scale *"),
        ("scale=1.0", "scale=2.0"),
        ('"right": 0.8', '"right": 0.9'),
        ("[0.1, 0.1]", "[0.1, 0.2]"),
        ("0.5 if", "0.4 if"),
        ("PATTERN.search", "PATTERN.match"),
        ('"[a-z]+"', '"[0-9]+"'),
        ('"[a-z]+")', '"[a-z]+", re.ASCII)'),
    ],
)
def test_what_a_reward_does_changes_it(made, old: str, new: str) -> None:
    assert old in BASE
    one, other = identity(made(BASE).score), identity(made(BASE.replace(old, new)).score)
    assert one != other
    assert change(one, other) == "my_rewards:score, or what it uses, has changed"


def test_a_helper_in_another_module_changes_it(made) -> None:
    one = identity(made(BASE).score)
    other = identity(made(BASE, HELPERS.replace("isalpha", "isupper")).score)
    assert one != other
    by_module = BASE.replace("from helpers import letters", "import helpers").replace("letters(", "helpers.letters(")
    one = identity(made(by_module).score)
    assert one == identity(made(by_module).score)
    assert one != identity(made(by_module, HELPERS.replace("isalpha", "isupper")).score)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another\n        # of two lines"),
        ("def part(text):", "def part(text: str) -> float:"),
        ("class Judge", "def unused(run):\n        return 7\n\n    class Judge"),
    ],
)
def test_what_does_not_matter_leaves_it(made, old: str, new: str) -> None:
    assert old in BASE
    assert identity(made(BASE).score) == identity(made(BASE.replace(old, new)).score)


def test_what_it_counts_for_itself_leaves_it(made) -> None:
    module = made(BASE)
    before = identity(module.score)
    module.seen = 7
    assert identity(module.score) == before


def test_names_objects_partials_and_closures(made) -> None:
    module = made(BASE)
    assert re.fullmatch(r"my_rewards:score#[0-9a-f]{12}", identity(module.score))
    assert identity(module.score) != identity(partial(module.score, scale=2.0)) != identity(partial(module.score))
    judge, other = module.Judge(), module.Judge()
    assert identity(judge).startswith("my_rewards:Judge#")
    assert identity(judge) == identity(other)
    other.limit = 4
    assert identity(judge) != identity(other)
    assert identity(judge.__call__) != identity(other.__call__)

    def with_threshold(threshold: float):
        return lambda run: run.output > threshold

    assert identity(with_threshold(1)) == identity(with_threshold(1)) != identity(with_threshold(2))


def test_success_is_a_part_of_it(made) -> None:
    module = made(BASE)
    both = identity(module.score, module.part)
    assert re.fullmatch(r"my_rewards:score#\w+ and my_rewards:part#\w+", both)
    assert both.startswith(identity(module.score))
    assert (
        change(identity(module.score), both)
        == "it was my_rewards:score and is my_rewards:score and my_rewards:part now"
    )


def test_anything_can_be_asked_for(made) -> None:
    """What a reward may hold: locks, itself, builtins, modules, empty cells, lone surrogates."""
    lock, text = threading.Lock(), "\ud800"

    def itself(run):
        with lock:
            return itself(run) + len(text) + late if run else Path("x")

    if lock is None:
        late = 1
    assert identity(itself) == identity(itself)
    assert identity(len) == identity(len) != identity(sum)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert identity(partial(itself, deep)) == identity(partial(itself, deep))

    class Shy:
        """As a proxy of a web framework outside of a request."""

        @property
        def __class__(self):
            raise RuntimeError("outside of a request")

        def __getattr__(self, name):
            raise RuntimeError("outside of a request")

    assert identity(partial(itself, Shy())) == identity(partial(itself, Shy())) != identity(partial(itself))
    looped: list[object] = []
    looped.append(looped)
    assert identity(partial(itself, looped)) == identity(partial(itself, looped))


def test_every_process_gives_the_same(tmp_path: Path) -> None:
    source = dedent(BASE).replace("from helpers import letters", "letters = len") + "\nNAMES = {'a', 'b', 'c'}\n"
    (tmp_path / "my_rewards.py").write_text(source.replace("scale *", 'len(NAMES) * (run in {"x", "y", "z"}) *'))
    program = "import my_rewards; from art_backends.rewards.identity import identity; print(identity(my_rewards.score))"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(found) == 1
