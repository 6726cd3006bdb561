"""Guessed tokens: what they are made from, and that nobody can tell from the tokens whether there were any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from art_backends.engines.embedded import drafts, executors
from art_backends.engines.embedded.core import Engine
from art_backends.engines.embedded.drafts import Drafts, Trail
from art_backends.engines.embedded.executors import Cascade
from art_backends.engines.embedded.kv import Limits
from art_backends.engines.embedded.requests import Generation, Token
from transformers import PreTrainedModel

Models = Callable[..., PreTrainedModel]


def say(made: Drafts, prompt: Iterable[int], answer: Iterable[int]) -> None:
    trail = Trail(list(prompt))
    for token in answer:
        made.learn(trail, token)
        trail.ids.append(token)


def test_what_was_said_before_is_guessed_again() -> None:
    made = Drafts()
    for _ in range(10):
        say(made, [1, 2, 3], [10, 11, 12, 13, 14, 15])
    assert made.guess(Trail([1, 2, 3]), 12, 1) == [10, 11, 12, 13, 14, 15]
    assert made.guess(Trail([1, 2, 3, 10, 11]), 2, 1) == [12, 13]
    assert made.guess(Trail([4, 5, 6]), 12, 1) == []


def test_the_more_rows_share_a_pass_the_surer_a_guess_has_to_be() -> None:
    made = Drafts()
    for number in range(10):
        say(made, [1, 2, 3], [10 if number < 6 else 20 + number, 11, 12])
    assert made.guess(Trail([1, 2, 3]), 1, 1) == [10]  # seen in six of ten
    assert made.guess(Trail([1, 2, 3]), 1, 3 * drafts.BREAK_EVEN) == []


def test_a_longer_context_is_asked_first() -> None:
    made = Drafts()
    for _ in range(4):
        say(made, [7, 7, 7, 1, 2, 3], [30])
        say(made, [8, 8, 8, 1, 2, 3], [40])
    assert made.guess(Trail([7, 7, 7, 1, 2, 3]), 1, 1) == [30]
    assert made.guess(Trail([8, 8, 8, 1, 2, 3]), 1, 1) == [40]
    assert made.guess(Trail([9, 9, 9, 1, 2, 3]), 1, 1) in ([30], [40])


def test_a_policy_that_changes_is_followed() -> None:
    made = Drafts()
    for _ in range(500):
        say(made, [1, 2, 3], [10])
    for _ in range(100):
        say(made, [1, 2, 3], [11])
    assert made.guess(Trail([1, 2, 3]), 1, 1) == [11]


def test_a_passage_of_the_prompt_is_copied_once_it_has_paid() -> None:
    made = Drafts()
    passage = list(range(50, 70))
    for at in range(10):  # what follows stood there
        say(made, [*passage, 1, 2, *passage[at : at + 2]], passage[at + 2 : at + 5])
    assert made.guess(Trail([*passage, 3, 4, 50, 51]), 4, 1) == [52, 53, 54, 55]
    for number in range(90):  # what follows is never what stood there
        say(made, [*passage, 3, 4, 50, 51], [100 + number])
    assert made.guess(Trail([*passage, 5, 6, 51, 52]), 4, 64) == []


def test_contexts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_CONTEXTS", 40)
    made = Drafts()
    for number in range(200):
        say(made, [number, number + 1, number + 2], [1])
        assert len(made._next) <= 40
    assert made.guess(Trail([199, 200, 201]), 1, 1) == [1]


async def collect(engine: Engine, prompt: Iterable[int], **how: Any) -> list[Token]:
    return [token async for token in engine.submit(Generation(tuple(prompt), None, **how))]


@torch.no_grad()
def errors(model: Any, prompt: list[int], tokens: list[Token], heat: float) -> list[float]:
    logits = model(input_ids=torch.tensor([prompt + [token.id for token in tokens]])).logits[0].float() / heat
    logprobs = torch.log_softmax(logits, -1)
    return [abs(logprobs[len(prompt) - 1 + at, token.id].item() - token.logprob) for at, token in enumerate(tokens)]


# small slots: guesses meet the end of a slot, its move to a segment, and the end of the context
@pytest.mark.parametrize("limits", [Limits(), Limits(max_rows=6, slots=8, slot_tokens=24, min_shared=4, fold=6)])
@pytest.mark.parametrize("heat", [0.0, 0.1])
async def test_tokens_are_the_same_with_and_without_guesses(
    new_model: Models, limits: Limits, heat: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model()
    passes: list[int] = []
    compute = executors.compute

    def counted(*args: Any) -> Any:
        passes.append(1)
        return compute(*args)

    monkeypatch.setattr(executors, "compute", counted)
    prompts = [[5, 6, 7, 8, 9, 10, number % 3] for number in range(9)]
    rows: dict[int, list[list[Token]]] = {}
    made: dict[int, int] = {}
    for guesses in (0, 12):
        passes.clear()
        found: list[list[Token]] = []
        async with Engine(model, max_model_len=60, limits=limits, guesses=guesses) as engine:
            for _ in range(2):  # the second time what they say is known
                how = {"max_tokens": 100, "temperature": heat}
                found += await asyncio.gather(*(collect(engine, ids, seed=at, **how) for at, ids in enumerate(prompts)))
            assert isinstance(engine._executor, Cascade)
            right, all_guesses = engine._executor.right, engine._executor.guessed
        rows[guesses], made[guesses] = found, len(passes)
        assert (right > 0) == (guesses > 0)
        assert right <= all_guesses
    assert [[token.id for token in row] for row in rows[0]] == [[token.id for token in row] for row in rows[12]]
    assert all(row[-1].finish == "length" for row in rows[12])
    assert made[12] < 0.9 * made[0]
    off = [
        error for ids, row in zip(prompts * 2, rows[12], strict=True) for error in errors(model, ids, row, heat or 1.0)
    ]
    assert max(off) <= 1e-3


async def test_a_stop_token_among_the_guesses_ends_the_row(new_model: Models) -> None:
    model = new_model()
    async with Engine(model, max_model_len=60) as engine:
        usual = await collect(engine, [5, 6, 7, 8], max_tokens=20, temperature=0)
        stop = usual[12].id
        first = [token.id for token in usual].index(stop)
        for _ in range(3):
            row = await collect(engine, [5, 6, 7, 8], max_tokens=20, temperature=0, stop_token_ids=frozenset({stop}))
            assert [token.id for token in row] == [token.id for token in usual[: first + 1]]
            assert row[-1].finish == "stop"
        assert isinstance(engine._executor, Cascade)
        assert engine._executor.right > 0
