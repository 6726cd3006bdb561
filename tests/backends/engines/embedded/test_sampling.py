"""Sampling: the distribution drawn from, and the log-probability reported from that same distribution."""

from __future__ import annotations

import math
import random

import pytest
import torch
from art_backends.engines.embedded.sampling import Draws, Settings, sample
from hypothesis import given, settings
from hypothesis import strategies as st

PROBS = [0.5, 0.25, 0.125, 0.0625, 0.0625]


def logits(rows: int = 1) -> torch.Tensor:
    return torch.tensor([PROBS]).log().repeat(rows, 1)


def one(scores: torch.Tensor | None = None, *, seed: int = 0, **how: object) -> object:
    return sample(logits() if scores is None else scores, [Settings(Draws(random.Random(seed)), **how)])[0]


def test_frequencies_follow_the_probabilities() -> None:
    rows = 4000
    drawn = [item.id for item in sample(logits(rows), [Settings(Draws(random.Random(seed))) for seed in range(rows)])]
    for token, probability in enumerate(PROBS):
        deviation = math.sqrt(probability * (1 - probability) / rows)
        assert abs(drawn.count(token) / rows - probability) < 5 * deviation


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [p * p / sum(q * q for q in PROBS) for p in PROBS]),
        ({"top_k": 2}, [2 / 3, 1 / 3]),
        ({"top_p": 0.7}, [2 / 3, 1 / 3]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3]),
        ({"top_p": 1e-9}, [1.0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3]),
        ({"temperature": 0.0, "top_k": 1}, [0.5]),
    ],
)
def test_reported_logprobs_are_those_of_the_distribution(how: dict[str, float], expected: list[float]) -> None:
    seen = {}
    for seed in range(200):
        item = one(seed=seed, top_logprobs=5, **how)
        seen[item.id] = item.logprob
        if how.get("temperature") != 0.0:
            assert [p for _, p in item.top] == pytest.approx([math.log(p) for p in expected], abs=1e-5)
    assert set(seen) <= set(range(len(expected)))
    for token, logprob in seen.items():
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_rows_of_a_batch_are_sampled_each_its_own_way() -> None:
    rows = [
        Settings(Draws(random.Random(1)), temperature=0),
        Settings(Draws(random.Random(1)), top_k=1),
        Settings(Draws(random.Random(1)), top_logprobs=2),
    ]
    greedy, single, free = sample(logits(3), rows)
    assert (greedy.id, greedy.logprob) == (0, pytest.approx(math.log(0.5)))
    assert (single.id, single.logprob) == (0, pytest.approx(0.0, abs=1e-6))
    assert [len(item.top) for item in (greedy, single, free)] == [0, 0, 2]


class Only:
    def __init__(self, allowed: torch.Tensor | None) -> None:
        self._allowed = allowed

    def allowed(self) -> torch.Tensor | None:
        return self._allowed

    def accept(self, token_id: int) -> None:
        raise AssertionError(f"sampling does not accept tokens: {token_id}")


def test_masks() -> None:
    short = torch.tensor([False, True, True])  # shorter than the vocabulary: the rest is not allowed
    drawn = {one(seed=seed, mask=Only(short)).id for seed in range(50)}
    assert drawn == {1, 2}
    assert one(mask=Only(short), temperature=0).logprob == pytest.approx(math.log(2 / 3))
    assert one(mask=Only(None)).error is None
    assert "allows no token" in one(mask=Only(torch.zeros(5, dtype=torch.bool))).error


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_output_that_is_not_finite_is_an_error(value: float) -> None:
    scores = logits(2)
    scores[0, 2] = value
    bad, good = sample(scores, [Settings(Draws(random.Random(0))), Settings(Draws(random.Random(0)))])
    assert "not finite" in (bad.error or "")
    assert good.error is None


@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(0, 10_000))
def test_tokens_without_probability_are_never_drawn(vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, vocab, generator=generator) * 8
    keep = torch.randint(0, vocab, (3,), generator=generator)
    drop = torch.rand(3, vocab, generator=generator) < 0.9
    drop[torch.arange(3), keep] = False
    scores[drop] = -torch.inf
    for row, item in enumerate(sample(scores.clone(), [Settings(Draws(random.Random(seed + at))) for at in range(3)])):
        assert item.error is None
        assert not drop[row, item.id]
