"""Which examples can be imitated, and which a step learns."""

from collections import Counter

import pytest
from art_backends import sft
from art_backends.errors import ScenarioError
from art_backends.scenarios import Scenario

ASKED = {"role": "user", "content": "Rugs?"}
SAID = {"role": "assistant", "content": "7."}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([ASKED], "nothing to imitate"),
        ([ASKED, {"role": "assistant", "content": ""}], "nothing to imitate"),
        ([ASKED, {**SAID, "weight": 0}], "nothing to imitate"),
        ([ASKED, {**SAID, "weight": 0.5}], r'message 2: "weight" must be 0'),
        ([{**ASKED, "weight": 1}, SAID], r'message 1: "weight" must be 0 .* of a message of the assistant'),
        ([SAID, ASKED, SAID], "begins with the assistant"),
        ("Rugs?", "no list of messages"),
    ],
)
def test_what_cannot_be_imitated_is_named(messages, words):
    good = {"messages": [ASKED, SAID]}
    with pytest.raises(ScenarioError, match=rf"example 2 .*{words}"):
        sft.read([good, {"messages": messages}])


def test_context_and_what_is_learned():
    assert len(sft.read([{"messages": [ASKED, {**SAID, "weight": 0}, ASKED, {**SAID, "weight": 1}]}])) == 1


@pytest.mark.parametrize(("count", "epochs", "size", "steps"), [(5, 3, 4, 4), (4, 1, 8, 1), (6, 2, 3, 4)])
def test_a_plan_learns_each_example_once_per_epoch(count, epochs, size, steps):
    plan = sft.Plan([Scenario(str(n), {"n": n}) for n in range(count)], epochs, size, seed=3, shuffle=True)
    assert plan.steps == steps
    batches = [plan.batch(step) for step in range(1, steps + 1)]
    assert all(len(batch) == size for batch in batches[:-1])
    assert Counter(item["n"] for batch in batches for item in batch) == dict.fromkeys(range(count), epochs)
