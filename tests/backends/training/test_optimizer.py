"""The learning rate as a function of the step, and that the optimizers are torch's own."""

from __future__ import annotations

import pytest
import torch
from art_backends.config import TrainConfig
from art_backends.training import optimizer


def rates(count: int, **settings) -> list[float]:
    config = TrainConfig(learning_rate=1.0, steps=4, **settings)
    return [optimizer.learning_rate(config, step) for step in range(1, count + 1)]


def test_constant():
    assert rates(6) == [1.0] * 6


def test_linear_ends_above_zero_and_stays_there():
    assert rates(6, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.25, 0.25])


def test_cosine():
    assert rates(4, schedule="cosine") == pytest.approx([1.0, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2])


def test_warmup_rises_in_equal_parts_and_the_rest_falls():
    assert rates(4, warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert rates(4, warmup_steps=2, schedule="linear") == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5])


@pytest.mark.parametrize("settings", [{"warmup_steps": 4}, {"warmup_steps": 9, "schedule": "cosine"}])
def test_a_warmup_longer_than_the_run_never_reaches_the_rate(settings):
    assert all(0 < rate <= 0.8 for rate in rates(4, **settings))


def test_a_step_uses_its_rate_and_decay():
    parameters = {"a": torch.nn.Parameter(torch.ones(2, 2))}
    made = optimizer.make(parameters, TrainConfig(optimizer="sgd"))
    config = TrainConfig(optimizer="sgd", steps=2, schedule="linear", learning_rate=0.5, weight_decay=0.1)
    assert optimizer.configure(made, config, 2) == pytest.approx(0.25)
    parameters["a"].grad = torch.full((2, 2), 2.0)
    made.step()
    assert parameters["a"].tolist() == [[pytest.approx(1 - 0.25 * (2.0 + 0.1))] * 2] * 2


@pytest.mark.parametrize(
    ("kind", "made"),
    [("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor), ("sgd", torch.optim.SGD)],
)
def test_kinds(kind, made):
    assert type(optimizer.make({"a": torch.nn.Parameter(torch.ones(2, 2))}, TrainConfig(optimizer=kind))) is made
