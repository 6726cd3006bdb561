"""Does imitation help? Worked examples first, then the quickstart's training from there, over several seeds.

    python benchmarks/imitation.py [--json FILE] [--quick] [--seeds 0 1 2 3 4] [--examples 60] [--epochs 3]
                                   [--held-out 200] [--steps 40] [--folder .art/imitation]

Per seed: ``--examples`` conversations as an expert would have them (training wordings and values; the right tool, its
result, the answer), imitated from the base model; then the quickstart's own training begins from that adapter. Told
are held-out success of the base, after imitation and after training, and the steps of the latter: learning.py has the
same figures without imitation. The held-out questions are the same for all.

A seed that is complete is not run again; an interrupted one goes on. ``--quick`` is one seed, few examples and steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
os.environ.setdefault("OPENAI_API_KEY", "not-needed-while-training")

from app import PROMPT, TOOLS, graph  # noqa: E402 - of the recipe, which is no package
from art_backends import sft  # noqa: E402
from art_backends.backend import LocalServer  # noqa: E402
from art_backends.config import make_config  # noqa: E402
from art_backends.display import make_display, plain_console  # noqa: E402
from langchain_core.messages import convert_to_openai_messages  # noqa: E402
from langchain_core.utils.function_calling import convert_to_openai_tool  # noqa: E402
from reward import score  # noqa: E402
from scenarios import make  # noqa: E402
from settings import SETTINGS  # noqa: E402

import art_langgraph  # noqa: E402

ANSWERS = {
    "order_arrival": "It arrives on {}.",
    "customer_phone": "The number is {}.",
    "product_stock": "We have {}.",
    "customer_city": "The city is {}.",
}
IMITATION = {"learning_rate": 3e-4, "name": "taught"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="one seed, 8 examples, 12 questions, 1 step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds (default: 0 1 2 3 4)")
    parser.add_argument("--examples", type=int, default=60, help="worked examples (default: 60)")
    parser.add_argument("--epochs", type=int, default=3, help="times that each is imitated (default: 3)")
    parser.add_argument("--held-out", type=int, default=200, help="held-out questions (default: 200)")
    parser.add_argument("--steps", type=int, default=40, help="training steps at most (default: 40)")
    parser.add_argument("--folder", type=Path, default=Path(".art/imitation"), help="run folders go there")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.examples, options.epochs = options.seeds[:1], 8, 1
        options.held_out, options.steps, options.folder = 12, 1, options.folder / "quick"
    rows = []
    for seed in options.seeds:
        row = run_seed(seed, options)
        rows.append(row)
        print(
            f"seed {seed}: {row['imitated_success']:.3f} after imitation ({row['imitation_seconds'] / 60:.1f} min), "
            f"{row['trained_success']:.3f} after {row['steps']} steps ({row['train_seconds'] / 60:.1f} min)",
            flush=True,
        )
    medians = {name: statistics.median(row[name] for row in rows) for name in ("imitated_success", "steps")}
    print(f"median: {medians['imitated_success']:.3f} after imitation, {medians['steps']:g} steps from there")
    if options.json is not None:
        plan = {key: value for key, value in vars(options).items() if key not in ("json", "folder")}
        result = {"plan": {**plan, "settings": SETTINGS, "imitation": IMITATION}, "seeds": rows, "median": medians}
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return 0


def run_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Imitation and training of one seed; reads the figures where both are done."""
    folder = options.folder / f"seed-{seed}"
    done = folder / "figures.json"
    if done.exists():
        figures: dict[str, Any] = json.loads(done.read_text())
        return figures
    taught = make_config({**IMITATION, "folder": folder / "taught", "seed": seed})
    begun = time.monotonic()
    imitated = asyncio.run(imitate(taught, examples(options.examples, seed), options.epochs))
    seconds = time.monotonic() - begun
    adapter = taught.folder / "versions" / imitated.version
    report = art_langgraph.train(
        graph,
        scenarios=make(600, held_out=False, seed=seed),
        held_out=make(options.held_out, held_out=True),
        reward=score,
        config={**SETTINGS, "folder": folder / "run", "steps": options.steps, "seed": seed, "init_adapter": adapter},
    )
    figures = {
        "seed": seed,
        "imitation_steps": imitated.steps,
        "imitation_seconds": seconds,
        "imitation_loss": [imitated.first_loss, imitated.last_loss],
        "imitated_success": report.base_success,  # of version 0 of that run: what it began from
        "trained_success": report.trained_success,
        "confidence_interval": report.confidence_interval,
        "steps": report.steps,
        "rollouts": report.rollouts,
        "train_seconds": report.train_seconds,
    }
    done.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


async def imitate(config: Any, given: list[dict[str, Any]], epochs: int) -> sft.SftReport:
    async with LocalServer(config) as server:
        found = sft.read(given)
        display = make_display(plain_console())
        return await sft.run(client=server.client, config=config, examples=found, display=display, epochs=epochs)


def examples(count: int, seed: int) -> list[dict[str, Any]]:
    """What an expert would have said to questions of the training kind; none of them is a training question."""
    asked = make(600 + count, held_out=False, seed=seed)[600:]  # behind those that the run trains on
    tools = [convert_to_openai_tool(tool) for tool in TOOLS]
    prompt = convert_to_openai_messages(PROMPT)
    prompt = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in prompt]  # the app's own worked examples
    return [{"messages": [*prompt, *conversation(scenario)], "tools": tools} for scenario in asked]


def conversation(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    function = {"name": scenario["tool"], "arguments": json.dumps(scenario["arguments"])}
    call = {"id": "call-1", "type": "function", "function": function}
    return [
        *scenario["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": scenario["answer"]},
        {"role": "assistant", "content": ANSWERS[scenario["tool"]].format(scenario["answer"])},
    ]


if __name__ == "__main__":
    raise SystemExit(main())
