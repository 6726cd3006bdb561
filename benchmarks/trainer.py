"""Speed of one update (forward, backward, optimizer) of the trainer, in one run, on synthetic trajectories.

Shapes: ``quickstart``: groups of 8 rollouts, 512 prompt tokens common to all groups, 15 of each group's own, then two
or three calls within 30 to 90 tokens. ``deep``: one group of 8 rollouts, 10 calls each, 4,000 tokens.

Compared: this trainer (one prefix forest); the same kernels on padded rows (``padded``, one per branch); transformers +
peft, padded, at most four rows at a time, logits of every position, one row per branch (``peft``) and one per call
(``rows_per_call``); and TRL's GRPO step on one row per branch (``trl``), where trl, accelerate and datasets are
installed. The baselines compute every n-th of their batches (``--every``) and are scaled by tokens. The model is Llama
of SmolLM2-135M's shape with random weights and the default LoRA. Gradients of the trees and of the padded rows are
compared, too (on whole batches only).

    python benchmarks/trainer.py [--quick] [--json FILE] [--shape NAME] [--groups N] [--layers N] [--threads N]

It refuses to say anything about learning, and to compare with other trainers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import trainer_baselines as baselines
from art_backends.config import TrainConfig
from art_backends.training import adapters, advantages, packing, sequences
from art_backends.training.forward import Forward
from art_backends.training.packing import Pack
from art_backends.training.updates import Updates
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Sampling, Trajectory, TrajectoryGroup
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 49152
Item = TypeVar("Item")


def quickstart(groups: int, rollouts: int, draw: random.Random) -> list[TrajectoryGroup]:
    """Many questions behind one long system prompt, short answers."""
    system = _ids(draw, 512)
    found = []
    for number in range(groups):
        prompt = [*system, *_ids(draw, 15)]
        trajectories = []
        for sample in range(rollouts):
            calls = draw.choice([2, 3])
            piece = draw.randint(30, 90) // (2 * calls - 1)
            trajectories.append(_rollout(draw, f"{number:02}-{sample}", prompt, calls, piece, piece))
        found.append(TrajectoryGroup(group=f"g{number}", trajectories=trajectories))
    return found


def deep(groups: int, rollouts: int, draw: random.Random) -> list[TrajectoryGroup]:
    """Long agents: 10 calls, the last sees about 4,000 tokens."""
    found = []
    for number in range(groups):
        prompt = _ids(draw, 400)
        trajectories = [_rollout(draw, f"{number:02}-{sample}", prompt, 10, 80, 310) for sample in range(rollouts)]
        found.append(TrajectoryGroup(group=f"g{number}", trajectories=trajectories))
    return found


def _rollout(
    draw: random.Random, name: str, prompt: Sequence[int], calls: int, sampled: int, between: int
) -> Trajectory:
    made, ids = [], list(prompt)
    for turn in range(calls):
        answer = _ids(draw, sampled)
        made.append(
            Call(
                id=f"{name}-{turn}",
                sequence=turn,
                status=CallStatus.OK,
                capture=CaptureLevel.TOKENS,
                prompt_token_ids=list(ids),
                choices=[Choice(index=0, token_ids=answer, logprobs=[-10.8] * sampled)],
                sampling=Sampling(),
            )
        )
        ids += [*answer, *_ids(draw, between)]
    return Trajectory(rollout_id=name, reward=draw.random(), calls=made)


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, VOCABULARY) for _ in range(count)]


def make_base(layers: int) -> Any:
    """SmolLM2-135M's shape, random weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    )
    model.requires_grad_(False)
    return model.eval()


def with_lora(base: Any, config: TrainConfig) -> Any:
    """A LoRA whose B is not zero, so that every weight has a gradient."""
    model = adapters.attach(base, config)
    adapters.initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, item in adapters.parameters(model).items():
            if ".lora_B." in name:
                item.copy_(torch.randn(item.shape, generator=generator) * 0.02)
    return model


class Keep:
    """In the optimizer's place: keeps the gradients, so that all contenders start from the same weights."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.gradients: dict[str, torch.Tensor] = {}
        self.param_groups = [{"lr": 0.0}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for item in self.parameters.values():
            item.grad = None

    def step(self) -> None:
        self.gradients = {name: item.grad.clone() for name, item in self.parameters.items() if item.grad is not None}


def by_packs(
    forward: Forward, config: TrainConfig, plan: advantages.Plan, packs: Sequence[Pack]
) -> dict[str, torch.Tensor]:
    """One update of the trainer over these packs; its gradients."""
    parameters = adapters.parameters(forward.model)
    keep = Keep(parameters)
    Updates(
        forward=forward,
        parameters=parameters,
        optimizer=keep,  # type: ignore[arg-type]
        config=config,
        plan=plan,
        packs=packs,
        reference=contextlib.nullcontext,
        progress=lambda _done, _all: None,
        cancelled=lambda: False,
    ).run()
    return keep.gradients


def timed(work: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Seconds of the clock and of the CPU, and what the work gave."""
    begun, used = time.perf_counter(), time.process_time()
    result = work()
    return (time.perf_counter() - begun, time.process_time() - used), result


def distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """Relative L2 over all tensors."""
    off = sum(float((first[name] - second[name]).double().square().sum()) for name in second)
    return (off / sum(float(item.double().square().sum()) for item in second.values())) ** 0.5


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All contenders in turn, ``--repeat`` times; medians."""
    config = TrainConfig(pack_tokens=args.pack_tokens)
    groups = SHAPES[args.shape](args.groups, args.rollouts, random.Random(3))
    built = sequences.build(groups)
    plan = advantages.plan(built, config)
    forest = sequences.forest(plan.groups)
    forward = Forward(with_lora(make_base(args.layers), config), torch.device("cpu"), torch.float32)

    trees = packing.tree_packs(plan.groups, config.pack_tokens)
    padded = packing.plain_packs(plan.groups, min(config.pack_tokens, 4096))
    rows = {
        "peft": baselines.micro_batches(baselines.row_per_rollout(forest, plan)),
        "rows_per_call": baselines.micro_batches(baselines.row_per_call(forest, plan)),
    }
    works: dict[str, tuple[float, Callable[[], Any]]] = {"tree": (1.0, lambda: by_packs(forward, config, plan, trees))}
    if not args.only_tree:
        some = _some(padded, args.every)
        works["padded"] = (_size(padded) / _size(some), lambda: by_packs(forward, config, plan, some))
        usual = with_lora(make_base(args.layers), config)
        for name, batches in rows.items():
            works[name] = _baseline(usual, batches, args.every, functools.partial(baselines.plain_step, usual))
        if baselines.has_trl():
            trl = baselines.TrlStep(with_lora(make_base(args.layers), config))
            works["trl"] = _baseline(trl.trainer.model, rows["peft"], args.every, trl.run)

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    by_packs(forward, config, plan, packing.tree_packs(plan.groups[:1], 1024)[:1])  # warm up
    for _ in range(args.repeat):
        for name, (scale, work) in works.items():
            (wall, cpu), gradients[name] = timed(work)
            seconds[name].append((wall * scale, cpu * scale))

    unique = sequences.distinct_tokens(forest)
    computed = sum(pack.tokens for pack in trees)
    figures: dict[str, Any] = {
        "shape": args.shape,
        "groups": args.groups,
        "rollouts": len(plan.advantage),
        "calls": len(forest),
        "layers": args.layers,
        "threads": torch.get_num_threads(),
        "malloc": os.environ.get("MALLOC_MMAP_MAX_", "default"),
        "packs": len(trees),
        "tokens_unique": unique,
        "tokens_computed": computed,
        "computed_to_unique_tokens": computed / unique,
        "tokens_padded_rows": _size(padded),
        "tokens_rows_per_call": baselines.padded_tokens(rows["rows_per_call"]),
        "peak_memory_mib": _peak(),
    }
    medians = {}
    for name, values in seconds.items():
        figures[f"{name}_s"] = statistics.median(wall for wall, _ in values)
        medians[name] = figures[f"{name}_cpu_s"] = statistics.median(cpu for _, cpu in values)
    for name in list(works)[1:]:
        figures["every"] = args.every
        figures[f"speedup_vs_{name}"] = medians[name] / medians["tree"]
    if "padded" in works:
        figures["time_to_padded"] = medians["tree"] / medians["padded"]
        if args.every == 1:
            figures["gradient_relative_l2"] = distance(gradients["tree"], gradients["padded"])
    return figures


def _peak() -> float:
    """Largest resident memory so far, of all contenders, MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _size(packs: Sequence[Pack]) -> int:
    return sum(pack.input_ids.size for pack in packs)


def _some(items: Sequence[Item], every: int) -> Sequence[Item]:
    """Every n-th, from the middle of the first n: they are sorted by length."""
    return items[min(every // 2, len(items) - 1) :: every]


def _baseline(
    model: Any, batches: Sequence[Sequence[baselines.Row]], every: int, step: Callable[[Any], None]
) -> tuple[float, Callable[[], None]]:
    """Every n-th micro-batch, the factor to all of them, and the gradients forgotten afterwards."""
    some = _some(batches, every)

    def work() -> None:
        step(some)
        model.zero_grad()

    return baselines.padded_tokens(batches) / baselines.padded_tokens(some), work


SHAPES = {"quickstart": quickstart, "deep": deep}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 groups of 4 rollouts, 2 layers, once")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--shape", default="quickstart", choices=list(SHAPES))
    parser.add_argument("--groups", type=int, help="groups of the batch (quickstart: 8, deep: 1)")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    parser.add_argument("--pack-tokens", type=int, default=TrainConfig().pack_tokens)
    parser.add_argument("--every", type=int, default=8, help="baselines compute every n-th batch, scaled up")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only-tree", action="store_true", help="leave the baselines out")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    args = parser.parse_args()
    args.groups = args.groups or (1 if args.shape == "deep" else 8)
    if args.quick:
        args.groups, args.rollouts, args.layers, args.repeat, args.every = min(args.groups, 2), 4, 2, 1, 1
    if args.threads:
        torch.set_num_threads(args.threads)
    figures = measure(args)
    for name, value in figures.items():
        print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
