"""recipes/art_style: the game is right, and the loop runs on a random model and goes on where it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "art_style"
sys.path.insert(0, str(RECIPE))

from game import Game, _slide  # noqa: E402 - of the recipe, which is no package

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ([2, 0, 2], [4, 0, 0]),
        ([2, 2, 2], [4, 2, 0]),
        ([2, 2, 4], [4, 4, 0]),
        ([0, 0, 8], [8, 0, 0]),
        ([2, 4, 2], [2, 4, 2]),
    ],
)
def test_tiles_slide_and_join_once(line: list[int], after: list[int]) -> None:
    assert _slide(line) == after


def test_moves_of_all_directions() -> None:
    game = Game(0, [[2, 0, 0], [0, 0, 0], [2, 0, 4]])
    game.cells = [[2, 0, 0], [0, 0, 0], [2, 0, 4]]
    assert game._after("up") == [[4, 0, 4], [0, 0, 0], [0, 0, 0]]
    assert game._after("down") == [[0, 0, 0], [0, 0, 0], [4, 0, 4]]
    assert game._after("right") == [[0, 0, 2], [0, 0, 0], [0, 2, 4]]
    assert not game.move("sideways")
    assert game.move("left")
    assert sum(cell > 0 for row in game.cells for cell in row) == 4  # three, and a new one


def test_a_game_ends_when_nothing_moves_or_it_is_won() -> None:
    game = Game(1)
    game.cells = [[2, 4, 2], [4, 2, 4], [2, 4, 2]]
    assert game.over
    assert not game.won
    game.cells[0][0] = 32
    assert game.won
    assert [Game(5).text() == Game(5).text(), Game(5).text() == Game(6).text()] == [True, False]


def test_the_recipe_runs_and_goes_on(project: Any) -> None:
    command = [str(RECIPE / "train.py"), "--base-model", str(project.model), "--folder", "runs"]
    first = project.call("python", *command, "--steps", "1")
    assert first.code == 0, first.err
    assert first.out.startswith("step 1: reward 0.")
    second = project.call("python", *command, "--steps", "2")
    assert second.code == 0, second.err
    assert second.out.startswith("step 2: ")
    assert (project.path / "runs/games/slider/store.sqlite").exists()
