"""``art-backends rollouts``: whole ids however narrow the terminal, and one rollout by the beginning of its id."""

import json

import pytest
from art_backends.store import Store
from art_backends.trajectories import Rollout


async def test_the_list_and_one_rollout(trained):
    first, second = trained.rollouts
    listed = await trained.says("rollouts", "list", "--step", "1")
    assert first in listed
    assert second in listed
    assert "[red]s" in listed  # text of the app is shown, not read as markup
    assert "no rollouts (training opens them" in await trained.says("rollouts", "list", "--step", "2")
    assert {row["id"] for row in json.loads(await trained.says("rollouts", "list", "--json"))} == {first, second}

    shown = await trained.says("rollouts", "show", first)
    assert "where [bold]is[/bold] 4417?" in shown
    assert "[red]s" in shown
    assert "3 tokens trained with advantage +0.500" in shown
    assert "tokens sampled, stop" in shown
    as_json = json.loads(await trained.says("rollouts", "show", first, "--json"))
    assert as_json["calls"][0]["choices"][0]["token_ids"]
    assert as_json["training"][0]["trained"] == 3


def add(trained, *ids, **facts):
    store = Store.open(trained.run / "store.sqlite")
    for number in ids:
        store.open_rollout(
            Rollout(id=number, **{"policy": "policy", "version": "policy@1", "scenario_id": "s", "opened": 1.0} | facts)
        )
    store.close()


@pytest.mark.parametrize("columns", ["20", "80", "250"])
async def test_ids_are_whole_and_a_rollout_is_a_line_however_narrow_the_terminal(trained, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    long = "f" * 32
    add(trained, long, scenario_id="where is my order? " * 50, version="a-longer-name@123456", step=123456)
    lines = (await trained.says("rollouts", "list")).splitlines()
    for whole in (*trained.rollouts, long):
        assert len([line for line in lines if whole in line]) == 1
    (line,) = [line for line in lines if long in line]
    for word in ("a-longer-name@123456", "123456", "where is my order? where is my …", "open"):
        assert word in line
    assert len(lines) == 3 + 3 + 1  # head, rollouts, foot
    assert len(line) < 150


async def test_the_newest_are_listed(trained):
    add(trained, "later1", "later2", "later3")
    rows = json.loads(await trained.says("rollouts", "list", "--limit", "2", "--json"))
    assert [row["id"] for row in rows] == ["later2", "later3"]


async def test_the_beginning_of_an_id_is_enough(trained):
    add(trained, "xa1b", "xa2b", "x_b", "xxb", *(f"y{number}" for number in range(7)), step=4, purpose="eval")
    for given, whole in (("xa1", "xa1b"), ("xa2b", "xa2b"), ("x_", "x_b")):
        assert f"rollout {whole} · eval" in await trained.says("rollouts", "show", given)
    two = await trained.refuses("rollouts", "show", "xa")
    assert "2 rollouts begin with 'xa', give more of the id: xa1b (eval, step 4), xa2b (eval, step 4)\n" in two
    many = await trained.refuses("rollouts", "show", "y")
    assert "more than 5 rollouts begin with 'y', give more of the id: y0 (eval, step 4), " in many
    assert "y4" in many
    assert "y5" not in many
    add(trained, "xa")
    assert "rollout xa · " in await trained.says("rollouts", "show", "xa"), "a whole id, whatever begins with it"


@pytest.mark.parametrize("given", ["nothing-like-it", "%", "_", "*", "' OR 1=1 --", "", "../status"])
async def test_an_unknown_id_is_told_with_the_way_to_find_one(trained, given):
    message = await trained.refuses("rollouts", "show", given)
    assert f"no rollout of {trained.run} begins with {given!r}; to find ids: " in message
    assert f"art-backends rollouts list --folder {trained.run}\n" in message
