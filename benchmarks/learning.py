"""Does the quickstart's agent learn? Five seeds and 200 held-out questions, all fixed before the first run.

    python benchmarks/learning.py [--json FILE] [--quick] [--seeds 0 1 2 3 4] [--held-out 200] [--steps 40]
                                  [--folder .art/learning]

Each seed is the quickstart itself (``recipes/quickstart/run.py``, its settings and its scenarios) in a run folder of
its own. A seed that is complete is not run again, one that was interrupted goes on; the seconds of all its parts are
counted. The held-out questions are the same for every seed; their values and wordings do not occur in training.

``--quick`` is one seed with few questions and steps: it shows that the script works, not that the agent learns. It
refuses to leave a seed out: one that fails is in the table and makes the exit code 1. It refuses to mix: a folder that
was begun with other settings has to be removed, or another one given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from settings import SETTINGS  # noqa: E402 - of the recipe, which is no package

SEEDS = [0, 1, 2, 3, 4]
GOALS = {"base_below": 0.3, "median_at_least": 0.9, "worst_at_least": 0.7}
FIGURES = (
    "base_success",
    "trained_success",
    "confidence_interval",
    "steps",
    "train_seconds",
    "mean_abs_logprob_difference",
    "drifted_calls",
    "computed_to_unique_tokens",
    "engine_tokens_per_second",
    "model_digest",
)
MARK = "benchmark.json"
INTERRUPTED = 130


@dataclass(frozen=True)
class Plan:
    """What is the same for all seeds."""

    folder: Path
    held_out: int
    steps: int

    def of(self, seed: int) -> dict[str, Any]:
        return {"seed": seed, "held_out": self.held_out, "steps": self.steps, "settings": SETTINGS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="one seed, 12 questions, 2 steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds (default: 0 1 2 3 4)")
    parser.add_argument("--held-out", type=int, default=200, help="held-out questions (default: 200)")
    parser.add_argument("--steps", type=int, default=40, help="training steps at most (default: 40)")
    parser.add_argument("--folder", type=Path, default=Path(".art/learning"), help="a run folder per seed goes there")
    options = parser.parse_args()
    seeds, plan = options.seeds, Plan(options.folder, options.held_out, options.steps)
    if options.quick:
        seeds, plan = options.seeds[:1], Plan(options.folder / "quick", min(plan.held_out, 12), min(plan.steps, 2))
    rows = []
    for seed in seeds:
        try:
            rows.append(run_seed(plan, seed))
        except KeyboardInterrupt:
            print(f"\nstopped at seed {seed}; the same command goes on", file=sys.stderr)
            return INTERRUPTED
    result = {
        "plan": {"seeds": seeds, "held_out": plan.held_out, "steps": plan.steps, "settings": SETTINGS},
        "seeds": rows,
        **totals(rows, judged=seeds == SEEDS and plan.held_out >= 200 and plan.steps <= 40),
        "goals": GOALS,
        "environment": environment(),
    }
    show(result)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return 1 if any(row["failed"] for row in rows) else 0


def run_seed(plan: Plan, seed: int) -> dict[str, Any]:
    """The figures of a seed: of its finished run, or of one made now. ``failed`` says why there are none."""
    folder = plan.folder / f"seed-{seed}"
    mark = folder / MARK
    wanted = json.loads(json.dumps(plan.of(seed), default=str))
    kept: dict[str, Any] = json.loads(mark.read_text()) if mark.exists() else {**wanted, "wall_seconds": 0.0}
    if {name: kept.get(name) for name in wanted} != wanted or (folder.exists() and not mark.exists()):
        raise SystemExit(f"{folder} was begun with other settings: remove it, or give another --folder")
    if kept.get("complete"):
        print(f"== seed {seed}: complete, see {folder}/report.json", flush=True)
        return figures(folder, kept)
    print(f"== seed {seed}: {plan.steps} steps, {plan.held_out} held-out questions, in {folder}", flush=True)
    write(mark, kept)
    command = [sys.executable, str(QUICKSTART / "run.py"), "--folder", str(folder), "--seed", str(seed)]
    command += ["--steps", str(plan.steps), "--held-out", str(plan.held_out)]
    begun = time.monotonic()
    code: int | None = None
    try:
        code = subprocess.run(command, check=False).returncode
    finally:
        kept["wall_seconds"] += time.monotonic() - begun
        kept["complete"] = code == 0
        kept["failed"] = None if code in (0, INTERRUPTED, None) else f"exit code {code}"
        write(mark, kept)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return figures(folder, kept)


def figures(folder: Path, kept: dict[str, Any]) -> dict[str, Any]:
    """One row of the table; a report with fewer questions than were asked is a failure, not a smaller sample."""
    row: dict[str, Any] = {"seed": kept["seed"], "wall_seconds": kept["wall_seconds"], "failed": kept.get("failed")}
    row |= dict.fromkeys(FIGURES)
    if row["failed"]:
        return row
    report = json.loads((folder / "report.json").read_text())
    row |= {name: report[name] for name in FIGURES}
    scored = report["evaluations"][-1]["scenarios"]
    if scored != kept["held_out"] or row["trained_success"] is None:
        row["failed"] = f"{scored} of {kept['held_out']} held-out questions were scored"
    return row


def totals(rows: list[dict[str, Any]], *, judged: bool) -> dict[str, Any]:
    """Over all seeds. With a failed seed there is no median and no worst: it would be one of the others'.

    ``judged``: whether this is the run that the goals are about; of another one they say nothing.
    """
    minutes = {
        "train_minutes": sum(row["train_seconds"] or 0.0 for row in rows) / 60,
        "minutes": sum(row["wall_seconds"] for row in rows) / 60,
    }
    trained = [row["trained_success"] for row in rows]
    if not rows or any(row["failed"] for row in rows):
        return {"base": None, "median": None, "worst": None, "goals_met": False if judged else None, **minutes}
    base, median, worst = max(row["base_success"] for row in rows), statistics.median(trained), min(trained)
    met = base < GOALS["base_below"] and median >= GOALS["median_at_least"] and worst >= GOALS["worst_at_least"]
    return {"base": base, "median": median, "worst": worst, "goals_met": met if judged else None, **minutes}


def show(result: dict[str, Any]) -> None:
    """The table, in the README's form."""
    names = "seed", "before", "after", "95 % interval", "steps", "training, min", "in all, min", "mean abs Δ logprob"
    print(f"\n| {' | '.join(names)} | drifted |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in result["seeds"]:
        if row["failed"]:
            print(f"| {row['seed']} | failed: {row['failed']} | | | | | {row['wall_seconds'] / 60:.1f} | | |")
            continue
        low, high = row["confidence_interval"]
        difference = row["mean_abs_logprob_difference"]
        print(
            f"| {row['seed']} | {row['base_success']:.3f} | {row['trained_success']:.3f} | {low:.3f} to {high:.3f} "
            f"| {row['steps']} | {row['train_seconds'] / 60:.1f} | {row['wall_seconds'] / 60:.1f} "
            f"| {'' if difference is None else f'{difference:.1e}'} | {row['drifted_calls']} |"
        )
    if result["median"] is not None:
        print(f"\nmedian {result['median']:.3f}, worst {result['worst']:.3f}, base {result['base']:.3f}", end="; ")
    judgement = {True: "met", False: "not met", None: "not judged by such a run"}[result["goals_met"]]
    print(f"{result['minutes']:.1f} minutes; goals {judgement}: {GOALS}")


def environment() -> dict[str, Any]:
    """The machine, so that minutes can be compared."""
    packages = {name: version(name) for name in ("torch", "transformers", "langgraph", "langchain-openai", "openai")}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu(),
        "cores": usable,
        "system": platform.platform(),
        "python": platform.python_version(),
        **packages,
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
