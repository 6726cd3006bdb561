"""Does playing the next step while this one trains pay? The same run twice: one thing after the other, and overlapped.

    python benchmarks/overlap.py [--json FILE] [--quick] [--steps 6] [--tool-seconds 20] [--repeats 3] [--staleness 1]

It is the quickstart's agent with tools that take ``--tool-seconds`` to answer, as a search or a test suite would. Each
repeat is both runs, in fresh folders, in turn; compared are the seconds of all steps together (rollouts, training and
swap; not the start of the server). The overlapped run makes the same steps from as many rollouts, which are up to
``--staleness`` versions old when they are trained.

``--quick`` is one repeat of three steps. It refuses to say what staleness costs in learning: see learning.py for that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
os.environ.setdefault("OPENAI_API_KEY", "not-needed-while-training")

import app  # noqa: E402 - of the recipe, which is no package
from reward import score  # noqa: E402
from scenarios import make  # noqa: E402
from settings import SETTINGS  # noqa: E402

import art_langgraph  # noqa: E402

CHANGED = {"groups_per_step": 2, "group_size": 4, "dynamic_sampling": 0, "target_success": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="one repeat, 3 steps")
    parser.add_argument("--steps", type=int, default=6, help="training steps of a run (default: 6)")
    parser.add_argument("--tool-seconds", type=float, default=20.0, help="what a tool takes (default: 20)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--staleness", type=int, default=1, help="max_staleness of the overlapped run (default: 1)")
    options = parser.parse_args()
    steps, repeats = (3, 1) if options.quick else (options.steps, options.repeats)
    make_slow(options.tool_seconds)
    pairs = []
    for repeat in range(repeats):
        pair = {
            "synchronous": run(steps, repeat),
            "overlapped": run(steps, repeat, overlap=True, max_staleness=options.staleness),
        }
        pair["speedup"] = pair["synchronous"]["seconds"] / pair["overlapped"]["seconds"]
        pairs.append(pair)
        print(
            f"{steps} steps: {pair['synchronous']['seconds']:.1f} s one after the other, "
            f"{pair['overlapped']['seconds']:.1f} s overlapped: {pair['speedup']:.2f} ×",
            flush=True,
        )
    speedups = [pair["speedup"] for pair in pairs]
    print(f"median {statistics.median(speedups):.2f} × ({min(speedups):.2f} to {max(speedups):.2f})")
    if options.json is not None:
        plan = {"steps": steps, "tool_seconds": options.tool_seconds, "staleness": options.staleness, **CHANGED}
        result = {"plan": plan, "pairs": pairs, "speedup_vs_synchronous": statistics.median(speedups)}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def make_slow(seconds: float) -> None:
    """Let the app's tools take a while; they are ordinary functions, which LangGraph runs in threads."""
    quick = app._lookup

    def slow(sql: str, key: str) -> str:
        time.sleep(seconds)
        return quick(sql, key)

    app._lookup = slow


def run(steps: int, seed: int, **settings: Any) -> dict[str, Any]:
    """One run in a fresh folder: its seconds, and the rows of its steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = {**SETTINGS, **CHANGED, "folder": folder, "steps": steps, "seed": seed, **settings}
        art_langgraph.train(app.graph, scenarios=make(100, held_out=False, seed=seed), reward=score, config=values)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = "step", "outcome", "seconds", "rollout_seconds", "train_seconds", "staleness/max", "rollouts"
    rows = [{key: row.get(key) for key in names} for row in map(json.loads, lines) if "step" in row]
    return {"seconds": sum(row["seconds"] for row in rows), "steps": rows}


if __name__ == "__main__":
    raise SystemExit(main())
