"""The prefix cache: whatever is placed, the path and slot of a row spell its prompt, and bounds hold."""

from __future__ import annotations

import pytest
import torch
from art_backends.engines.embedded.kv import Arena, Limits, Shape
from art_backends.engines.embedded.tree import Place, Tree
from art_backends.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

LIMITS = Limits(max_rows=4, slots=6, slot_tokens=16, min_shared=3, fold=5, piece=8, cache_tokens=60)


def new_tree(limits: Limits = LIMITS) -> Tree:
    return Tree(Arena(Shape(1, 1, 1, torch.float32, torch.device("cpu")), limits, 64), limits)


def values(tree: Tree, place: Place) -> list[int]:
    """The context a row sees, read from the keys; the key of a token is its id here."""
    found: list[int] = []
    for node in place.parent.path():
        assert node.k is not None
        assert node.k.shape[1] == len(node.tokens)
        found += node.k[0, :, 0, 0].int().tolist()
    held = tree.arena.k[0, place.slot.index, : len(place.slot.tokens), 0, 0].int().tolist()
    assert held == place.slot.tokens
    return found + held


def compute(tree: Tree, key: str, places: list[Place]) -> None:
    """What a forward pass does, with the token's id as its key and value."""
    for node in tree.pending(key):
        assert node.parent is not None
        assert node.parent.parent is None or node.parent.k is not None
        node.k = torch.tensor(node.tokens).float().view(1, -1, 1, 1)
        node.v = node.k.clone()
    for place in places:
        held = len(place.slot.tokens)
        if held + len(place.todo) > tree.arena.slot_tokens:
            tree.spill(place.slot)
            held = 0
        place.slot.tokens += place.todo
        tree.arena.k[0, place.slot.index, held : len(place.slot.tokens), 0, 0] = torch.tensor(place.todo).float()
        place.todo.clear()


def test_a_common_beginning_becomes_one_segment() -> None:
    tree = new_tree()
    places = [tree.place("base", (1, 2, 3, 4, 5, 6, *tail)) for tail in ([7, 8], [9, 9, 9, 9, 9, 9, 9], [7, 8])]
    tree.settle()
    assert next(node.tokens for node in tree.pending("base")) == (1, 2, 3, 4, 5, 6)
    assert places[0].parent is places[2].parent
    assert places[0].todo == [8] or places[0].todo == [7, 8]
    assert tree.hits > 0


def test_the_next_turn_takes_the_slot_over() -> None:
    tree = new_tree()
    place = tree.place("base", (1, 2, 3))
    tree.settle()
    compute(tree, "base", [place])
    tree.release(place.slot)
    again = tree.place("base", (1, 2, 3, 4, 5))
    assert again.slot is place.slot
    assert again.todo == [4, 5]
    other = tree.place("other", (1, 2, 3, 4, 5))  # nothing is shared between keys
    tree.settle()
    assert len(other.todo) == 5 or tree.pending("other")


def test_a_released_row_that_was_not_computed_leaves_nothing() -> None:
    tree = new_tree()
    place = tree.place("base", tuple(range(30)))
    tree.settle()
    assert tree.tokens > 0
    tree.release(place.slot)
    assert tree.tokens == 0
    assert tree.pending("base") == []


def test_untrusted_slots_are_wiped() -> None:
    tree = new_tree()
    place = tree.place("base", (1, 2))
    compute(tree, "base", [place])
    tree.arena.k[0, place.slot.index] = torch.nan
    tree.release(place.slot, keep=False)
    assert not tree.arena.k.any()
    assert tree.place("base", (1, 2, 3)).todo == [1, 2, 3]


@pytest.mark.parametrize("bad", [{"max_rows": 0}, {"slots": 1}, {"slot_tokens": 10}, {"fold": 1}, {"piece": 0}])
def test_limits_that_contradict_each_other_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Limits(**bad)


@settings(max_examples=150)
@given(st.data())
def test_any_sequence_of_prompts_and_turns(data: st.DataObject) -> None:
    tree = new_tree()
    live: list[tuple[Place, list[int]]] = []
    past: list[list[int]] = [[]]
    token = st.integers(1, 3)
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 4 - len(live)))):
            old = data.draw(st.sampled_from(past))
            cut = data.draw(st.integers(0, len(old)))
            ids = old[: cut if data.draw(st.booleans()) else len(old)] + data.draw(
                st.lists(token, min_size=1, max_size=9)
            )
            if len(ids) > 40:
                continue
            tree.has_room(len(ids))
            live.append((tree.place("base", tuple(ids)), ids))
        tree.settle()
        compute(tree, "base", [place for place, _ in live])
        for place, ids in live:
            assert values(tree, place) == ids
        for place, ids in live:  # one decode step
            ids.append(data.draw(token))
            place.todo.append(ids[-1])
        compute(tree, "base", [place for place, _ in live])
        for place, ids in live:
            assert values(tree, place) == ids
        while live and data.draw(st.booleans()):
            place, ids = live.pop(data.draw(st.integers(0, len(live) - 1)))
            past.append(ids)
            tree.release(place.slot)
        held = sum(len(node.tokens) for node in tree._walk("base") if "base" in tree.roots)
        assert held == tree.tokens
        assert len({place.slot.index for place, _ in live}) == len(live)
    for place, _ in live:
        tree.release(place.slot)
    assert tree.has_room(0)
    assert tree.tokens <= LIMITS.cache_tokens
    tree.forget("base")
    assert tree.tokens == 0
