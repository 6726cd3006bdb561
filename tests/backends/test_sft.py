"""Which examples can be imitated, and which a step learns."""

from collections import Counter

import pytest
from art_backends import sft
from art_backends.client import StepOutcome
from art_backends.config import TrainConfig
from art_backends.errors import ConfigError, ScenarioError
from art_backends.scenarios import Scenario

from tests.backends.memory_server import Notes

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


class Server:
    def __init__(self):
        self.learned = {}

    async def status(self):
        step = max(self.learned, default=0)
        return {"policies": [{"name": "policy", "version": step, "step": step}]}

    async def train_step(self, step, config, *, examples=None, progress=None):
        self.learned[step] = [example["n"] for example in examples]
        return StepOutcome(kind="committed", version=step, metrics={"loss": 1.0 / step})


async def imitate(server, folder, examples, notes=None, **settings):
    return await sft.run(
        client=server,
        config=TrainConfig(folder=folder),
        examples=[Scenario(str(n), {"n": n}) for n in examples],
        display=notes or Notes(),
        **{"epochs": 2, "batch_size": 2, **settings},
    )


async def test_a_folder_goes_on_with_the_same_examples_only(tmp_path):
    server, notes = Server(), Notes()
    await imitate(server, tmp_path, [1, 2, 3])
    assert list(server.learned) == [1, 2, 3]
    await imitate(server, tmp_path, [1, 2, 3], epochs=4)
    assert list(server.learned) == [1, 2, 3, 4, 5, 6]
    await imitate(server, tmp_path, [1, 2, 3], notes, epochs=1)
    assert len(server.learned) == 6
    assert "nothing is left to do" in notes.text
    for examples, settings in (([1, 2, 4], {}), ([1, 2, 3], {"batch_size": 3})):
        with pytest.raises(ConfigError, match=r"holds a run that learns from other examples .*give another --folder"):
            await imitate(server, tmp_path, examples, **settings)


async def test_a_folder_of_a_run_with_rewards_is_refused(tmp_path):
    server = Server()
    server.learned[3] = []
    with pytest.raises(ConfigError, match="holds a run that learns from rewards"):
        await imitate(server, tmp_path, [1])
    assert list(server.learned) == [3]


def test_an_example_may_come_twice():
    example = {"messages": [ASKED, SAID]}
    assert len(sft.read([example, example])) == 2


@pytest.mark.parametrize(
    ("source", "words"), [([], "no examples"), ([3], "each example must be a JSON object"), (None, "examples must be")]
)
def test_errors_speak_of_examples(source, words):
    with pytest.raises(ScenarioError, match=words):
        sft.read(source)
