"""Engine and trainer on a GPU: do they agree, how fast are they, what do they hold. Nothing is fetched: random weights.

    python benchmarks/gpu_check.py [--device cuda] [--quick] [--json FILE]

A Llama of about a billion weights (``--quick``: a tiny one) is made, and a LoRA whose B is not zero. In float32 and in
bfloat16:

- *agreement*: the engine samples with the adapter, the trainer computes the same tokens' logprobs: the KL between the
  two (per token, estimated on the samples), the effective sample size of their ratio, and the largest difference;
- *speed*: tokens per second of the engine, and of plain ``generate`` for as many rows;
- *step*: seconds of one update on the prefix forest, and on padded rows with the same kernels; gradients compared; the
  most memory that the device held.

It refuses a device that is not there. ``--device cpu --quick`` shows that the script works, not what a GPU does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trainer as bench
from art_backends.config import TrainConfig
from art_backends.engines.embedded.core import Engine
from art_backends.engines.embedded.requests import Generation, Token
from art_backends.engines.embedded.weights import load_base
from art_backends.training import adapters, advantages, packing, sequences
from art_backends.training.forward import Forward
from art_backends.training.packing import Pack
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Sampling, Trajectory, TrajectoryGroup
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "checked@1"
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

Sampled = list[tuple[tuple[int, ...], list[Token]]]


def make_model(folder: Path, quick: bool) -> None:
    """Random weights as a folder that engine and trainer load like any other."""
    torch.manual_seed(0)
    shape = {**(TINY if quick else LARGE), "num_key_value_heads": 2 if quick else 8}
    settings = LlamaConfig(vocab_size=bench.VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(settings).to(torch.bfloat16).save_pretrained(folder)


def make_adapter(base: Path, folder: Path, config: TrainConfig) -> None:
    folder.mkdir()
    model = load_base(base, dtype=torch.float32, device="cpu")
    adapters.write(folder, bench.with_lora(model, config), config)


async def sample(engine: Engine, rows: int, prompt: int, new: int) -> tuple[Sampled, float]:
    """Rows in groups of 8 that share their prompt; seconds."""
    draw = random.Random(rows)
    prompts = [tuple(bench._ids(draw, prompt)) for _ in range(math.ceil(rows / 8)) for _ in range(8)][:rows]
    prompts = [prompts[at - at % 8] for at in range(rows)]

    async def one(at: int, ids: tuple[int, ...]) -> list[Token]:
        return [token async for token in engine.submit(Generation(ids, NAME, new, seed=at))]

    begun = time.perf_counter()
    found = await asyncio.gather(*(one(at, ids) for at, ids in enumerate(prompts)))
    return list(zip(prompts, found, strict=True)), time.perf_counter() - begun


def trajectories(sampled: Sampled) -> list[TrajectoryGroup]:
    """What was sampled, with rewards that have a spread."""
    groups: dict[tuple[int, ...], list[Trajectory]] = {}
    for number, (prompt, tokens) in enumerate(sampled):
        choice = Choice(token_ids=[token.id for token in tokens], logprobs=[token.logprob for token in tokens])
        call = Call(
            id=f"{number:04}",
            status=CallStatus.OK,
            capture=CaptureLevel.TOKENS,
            prompt_token_ids=list(prompt),
            choices=[choice],
            sampling=Sampling(),
        )
        rollout = Trajectory(rollout_id=f"{number:04}", reward=float(number % 2), calls=[call])
        groups.setdefault(prompt, []).append(rollout)
    return [TrajectoryGroup(group=f"g{n}", trajectories=items) for n, items in enumerate(groups.values())]


def agreement(forward: Forward, packs: Sequence[Pack]) -> dict[str, float]:
    """Sampler's logprobs with the trainer's."""
    ours, theirs = [], []
    for pack in packs:
        with torch.no_grad():
            logprobs = forward.logprobs(pack).double().cpu()
        ours.append(logprobs[torch.from_numpy(pack.occurrence_query)])
        theirs.append(torch.from_numpy(pack.occurrence_logprob).double())
    difference = torch.cat(theirs) - torch.cat(ours)  # log sampler - log trainer
    weight = torch.exp(-difference)
    return {
        "kl_sampler_trainer": float(difference.mean()),
        "max_abs_logprob_difference": float(difference.abs().max()),
        "effective_sample_size": float(weight.sum() ** 2 / (weight.square().sum() * len(weight))),
        "tokens": float(len(difference)),
    }


class Step:
    """One update of the trainer, on trees or on padded rows."""

    def __init__(self, forward: Forward, config: TrainConfig, plan: advantages.Plan) -> None:
        self._forward, self._config, self._plan = forward, config, plan

    def timed(self, packs: Sequence[Pack], repeats: int) -> tuple[float, dict[str, torch.Tensor]]:
        seconds, gradients = [], {}
        for number in range(repeats + 1):
            _wait(self._forward.device)
            begun = time.perf_counter()
            gradients = bench.by_packs(self._forward, self._config, self._plan, packs)
            _wait(self._forward.device)
            if number:  # the first one warms up
                seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds), gradients


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generated(model: Any, sampled: Sampled, new: int) -> float:
    """Seconds of plain ``generate`` for the same rows."""
    ids = torch.tensor([prompt for prompt, _ in sampled], device=model.device)
    _wait(model.device)
    begun = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new,
            min_new_tokens=new, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    _wait(model.device)
    return time.perf_counter() - begun


def measure(options: argparse.Namespace, folder: Path, dtype: torch.dtype) -> dict[str, float]:
    """All figures for one precision."""
    device = torch.device(options.device)
    config = TrainConfig(dtype="float32" if dtype is torch.float32 else "bfloat16")
    rows, prompt, new, repeats = (8, 40, 8, 1) if options.quick else (64, 512, 128, 3)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    base = load_base(folder / "base", dtype=dtype, device=options.device)

    async def engine_runs() -> tuple[Sampled, float]:
        async with Engine(base) as engine:
            engine.load_adapter(NAME, folder / "adapter")
            await sample(engine, 2, 16, 4)  # warm
            return await sample(engine, rows, prompt, new)

    sampled, seconds = asyncio.run(engine_runs())
    figures = {"engine_tokens_per_s": rows * new / seconds}
    figures["generate_tokens_per_s"] = rows * new / generated(base, sampled, new)
    figures["engine_peak_mib"] = _peak(device)
    built = sequences.build(trajectories(sampled))
    plan = advantages.plan(built, config)
    forward = Forward(bench.with_lora(base.requires_grad_(False).eval(), config), device, dtype)
    figures |= agreement(forward, packing.tree_packs(plan.groups, config.pack_tokens))

    shape = bench.SHAPES["quickstart"](1 if options.quick else 4, 4 if options.quick else 8, random.Random(3))
    plan = advantages.plan(sequences.build(shape), config)
    step = Step(forward, config, plan)
    trees, tree_gradients = step.timed(packing.tree_packs(plan.groups, config.pack_tokens), repeats)
    padded, padded_gradients = step.timed(packing.plain_packs(plan.groups, config.pack_tokens), repeats)
    figures |= {
        "step_s": trees,
        "padded_step_s": padded,
        "step_to_padded": trees / padded,
        "gradient_relative_l2": bench.distance(tree_gradients, padded_gradients),
        "tiled": float(forward.tiled),
        "trainer_peak_mib": _peak(device),
    }
    return figures


def _peak(device: torch.device) -> float:
    """The most that the device held, MiB (on a CPU: the process)."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else bench._peak()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: a CUDA build of torch and its driver are needed (or --device cpu)")
    figures: dict[str, Any] = {"device": options.device, "torch": torch.__version__}
    if options.device.startswith("cuda"):
        figures["gpu"] = torch.cuda.get_device_name(options.device)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "base", options.quick)
        make_adapter(folder / "base", folder / "adapter", TrainConfig())
        for dtype in (torch.float32, torch.bfloat16):
            found = figures[str(dtype).removeprefix("torch.")] = measure(options, folder, dtype)
            for name, value in found.items():
                print(f"{dtype!s:16} {name:28} {value:.5g}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
