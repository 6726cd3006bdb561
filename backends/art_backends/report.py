"""The result of a run: ``Report``, its ``report.json``, its curves, and the statistics behind it.

It refuses to flatter: a share comes with its 95 % Wilson interval, a figure that was not measured is null, and
rollouts that were excluded are counted beside those that were not.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from art_backends.errors import ConfigError, StoreError

_Z = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass
class Evaluation:
    """One pass over the held-out scenarios. ``success`` is None where the reward knows no success."""

    step: int
    version: str
    scenarios: int
    reward: float | None
    success: float | None
    errors: int = 0
    faults: int = 0


@dataclass
class Example:
    """One held-out scenario before and after training."""

    scenario: dict[str, Any]
    before: Any
    after: Any
    before_reward: float | None
    after_reward: float | None


@dataclass
class Report:
    """What a run did and reached. The field names are the keys of ``report.json``."""

    policy: str
    base_model: str
    model_digest: str | None = None
    version: str = ""
    stopped: str = ""  # why the run ended: "steps", "target"
    base_success: float | None = None
    trained_success: float | None = None
    base_confidence_interval: tuple[float, float] | None = None
    confidence_interval: tuple[float, float] | None = None  # of trained_success, 95 % Wilson
    base_reward: float | None = None
    trained_reward: float | None = None
    held_out: int = 0
    train_seconds: float = 0.0  # rollouts and training of all steps, over all parts of a resumed run
    steps: int = 0
    skipped_steps: int = 0
    rollouts: int = 0  # training rollouts
    errors: int = 0  # of those, where the agent failed (they train)
    faults: int = 0  # of those, excluded
    computed_to_unique_tokens: float | None = None
    drifted_calls: int | None = None
    mean_abs_logprob_difference: float | None = None  # sampler against trainer, per trained token
    max_abs_logprob_difference: float | None = None
    engine_tokens_per_second: float | None = None
    trained_tokens: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write ``report.json`` whole or not at all; StoreError if it cannot be."""
        write_json(path, asdict(self))


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically and durably."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temp.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from None


def wilson(successes: float, count: int) -> tuple[float, float] | None:
    """95 % Wilson interval of a share, None for no observations. ``successes`` may hold parts (0.5 of a success)."""
    if count <= 0:
        return None
    share = successes / count
    scale = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / scale
    half = _Z / scale * math.sqrt(max(share * (1 - share), 0) / count + _Z**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def histogram(values: Sequence[float], bins: int = 5) -> str:
    """Rewards in words: ``0 ×24, 1 ×8``, or ranges where there are many different ones."""
    if not values:
        return "no rewards"
    counts = Counter(round(value, 6) for value in values)
    if len(counts) <= bins + 1:
        return ", ".join(f"{value:g} ×{counts[value]}" for value in sorted(counts))
    low, high = min(values), max(values)
    width = (high - low) / bins
    binned = Counter(min(int((value - low) / width), bins - 1) for value in values)
    return ", ".join(
        f"{low + index * width:.3g}…{low + (index + 1) * width:.3g} ×{binned[index]}" for index in sorted(binned)
    )


def can_draw() -> bool:
    """Whether the ``plot`` extra is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_curves(rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation], path: Path) -> None:
    """Draw reward, success and the sampler-trainer difference over the steps as a PNG.

    ConfigError if matplotlib is missing (the ``plot`` extra); StoreError if the file cannot be written.
    """
    if not can_draw():
        raise ConfigError("curves need matplotlib: pip install 'art-inplace[plot]'")
    # Lazy: a heavy import that only this function needs; the object interface leaves the app's pyplot state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, label in (("reward", "mean reward"), ("success", "success of sampled rollouts")):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            top.plot(*zip(*points, strict=True), label=label, alpha=0.8)
    held_out = [(e.step, e.success if e.success is not None else e.reward) for e in evaluations]
    held_out = [point for point in held_out if point[1] is not None]
    if held_out:
        top.plot(*zip(*held_out, strict=True), "o--", color="black", label="held out")
    name = "sampling/sampling_logp_difference/mean"
    points = [(row["step"], row[name]) for row in rows if row.get(name)]
    if points:
        bottom.semilogy(*zip(*points, strict=True), color="tab:gray")
    bottom.set_ylabel("|Δ logprob|")
    bottom.set_xlabel("step")
    if top.get_legend_handles_labels()[0]:
        top.legend(loc="best")
    top.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from None
