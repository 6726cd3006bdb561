"""Tiny random models, batches, and an independent reference of the loss: one padded-free row per call, autograd."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from art_backends.config import TrainConfig
from art_backends.training.requests import StepRequest
from art_backends.training.trainer import Trainer
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Sampling, Trajectory, TrajectoryGroup
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 61
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**values, **changes})


def save_model(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return save_model(LlamaForCausalLM(tiny_config()), tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_trainer(model_path: Path, tmp_path: Path) -> Callable[..., Trainer]:
    def make(folder: Path | None = None, path: Path = model_path, **changes: Any) -> Trainer:
        values: dict[str, Any] = {"dtype": "float32", "device": "cpu", "base_digest": "digest"}
        return Trainer(path, policy="policy", versions=folder or tmp_path / "versions", **{**values, **changes})

    return make


def make_call(
    name: str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    more: Sequence[tuple[Sequence[int], Sequence[float]]] = (),
    sampling: Sampling | None = None,
    **changes: Any,
) -> Call:
    values = list(logprobs) if logprobs is not None else [-2.0] * len(sampled)
    choices = [Choice(index=0, token_ids=list(sampled), logprobs=values)]
    choices += [
        Choice(index=number, token_ids=list(ids), logprobs=list(probs)) for number, (ids, probs) in enumerate(more, 1)
    ]
    fields: dict[str, Any] = {
        "id": name,
        "status": CallStatus.OK,
        "capture": CaptureLevel.TOKENS,
        "prompt_token_ids": list(prompt),
        "choices": choices,
        "sampling": sampling or Sampling(),
    }
    return Call(**{**fields, **changes})


def make_group(name: str, *rollouts: tuple[str, float, Sequence[Call]]) -> TrajectoryGroup:
    return TrajectoryGroup(
        group=name,
        trajectories=[Trajectory(rollout_id=rid, reward=reward, calls=list(calls)) for rid, reward, calls in rollouts],
    )


def make_request(folder: Path, groups: Sequence[TrajectoryGroup], from_version: int = 0, **config: Any) -> StepRequest:
    settings: dict[str, Any] = {"rank": 4, "alpha": 8.0, "target_modules": TARGETS, "learning_rate": 1e-2, "seed": 3}
    return StepRequest(
        policy="policy",
        from_version=from_version,
        versions=folder,
        step=from_version + 1,
        config=TrainConfig(**{**settings, **config}),
        groups=list(groups),
    )


def rich_batch() -> list[TrajectoryGroup]:
    """Two groups: nested branches, a node sampled by several rollouts, n = 2, two temperatures, several turns."""
    system = [1, 2, 3, 4, 5]
    first = [*system, 6, 7]
    one = make_call("a1", first, [8, 9, 10], [-1.0, -2.0, -0.5])
    two = make_call("a2", [*first, 8, 9, 10, 20, 21], [11, 12], [-1.5, -3.0], sequence=1)
    three = make_call("a3", [*first, 8, 9, 10, 20, 21, 11, 12, 30], [13], [-0.1], sequence=2)
    same = make_call("b1", first, [8, 9, 10], [-1.2, -2.2, -0.7])  # the same tokens, by another rollout
    other = make_call("b2", [*first, 8, 9, 10, 20, 22], [11, 14, 15], [-2.5, -3.5, -1.0], sequence=1)
    side = make_call("b3", [*system, 40], [8, 41], [-2.0, -2.0], sequence=2)
    both = make_call("c1", first, [8, 17], [-3.0, -2.0], more=[([8, 9, 18], [-1.0, -1.0, -4.0])])
    warm = make_call("c2", [*first, 8, 17, 50], [51, 52], [-4.0, -3.0], sequence=1, sampling=Sampling(temperature=0.7))
    second = [2, 2, 30, 31, 32, 33]
    return [
        make_group("one", ("r1", 1.0, [one, two, three]), ("r2", 0.0, [same, other, side]), ("r3", 0.3, [both, warm])),
        make_group(
            "two",
            ("r4", 0.0, [make_call("d1", second, [34, 35, 36, 37], [-2.0] * 4)]),
            ("r5", 2.0, [make_call("e1", second, [34, 38], [-3.0, -1.0])]),
            ("r6", 0.0, [make_call("f1", second, [39], [-6.0])]),
        ),
        make_group(
            "flat",
            ("r7", 1.0, [make_call("g1", second, [4, 4])]),
            ("r8", 1.0, [make_call("h1", second, [5])]),
        ),
    ]


def common_batch(groups: int = 4) -> list[TrajectoryGroup]:
    """Groups with a common beginning of 20 tokens, 3 of their own, and 3 rollouts that sample 6 tokens each."""
    return [
        make_group(
            f"g{g}",
            *(
                (f"r{g}{n}", float(n), [make_call(f"c{g}{n}", [*range(20), 30, 40 + g, 50], [1 + n, 7, 8, 9, g, n])])
                for n in range(3)
            ),
        )
        for g in range(groups)
    ]


def plain_logprobs(model: Any, call: Call, choice: Choice) -> torch.Tensor:
    """Logprobs of a choice's tokens: one row, the model's ordinary forward."""
    ids = torch.tensor([[*call.prompt_token_ids, *choice.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float() / call.sampling.temperature
    start = len(call.prompt_token_ids)
    return torch.log_softmax(logits, -1)[range(start - 1, ids.shape[1] - 1), choice.token_ids]
