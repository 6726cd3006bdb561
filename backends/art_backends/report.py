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
from contextlib import suppress
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
    """One held-out scenario before and after training: the agent's final state, or None and its error in words."""

    scenario: dict[str, Any]
    before: Any
    after: Any
    before_reward: float | None
    after_reward: float | None
    before_error: str | None = None
    after_error: str | None = None


@dataclass
class Report:
    """What a run did and reached. The field names are the keys of ``report.json``."""

    policy: str
    base_model: str
    model_digest: str | None = None
    version: str = ""
    stopped: str = ""  # why the run ended: "steps", "target", "no_spread"
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
    alarms: list[str] = field(default_factory=list)  # sampled reward up, held-out reward down: when, and how much
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
        with suppress(OSError):
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


def summary(report: Report, folder: Path) -> list[str]:
    """The result in lines for a person: before and after, with examples, and how to go on."""
    lines = [""]
    for example in report.examples[:3]:
        lines += [
            f"scenario: {_short(example.scenario)}",
            f"  before ({_reward(example.before_reward)}): {_short(example.before_error or example.before)}",
            f"  after  ({_reward(example.after_reward)}): {_short(example.after_error or example.after)}",
            "",
        ]
    if report.base_success is not None and report.trained_success is not None:
        interval = report.confidence_interval
        spread = "" if interval is None else f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})"
        lines.append(
            f"success on {report.held_out} held-out scenarios: "
            f"{report.base_success:.3f} before, {report.trained_success:.3f} after{spread}"
        )
    if report.base_reward is not None and report.trained_reward is not None:
        lines.append(f"reward: {report.base_reward:.3f} before, {report.trained_reward:.3f} after")
    if not report.held_out:
        lines.append("no held-out scenarios: success was not measured")
    minutes = report.train_seconds / 60
    lines.append(
        f"{report.steps} steps, {report.rollouts} rollouts ({report.faults} excluded) in {minutes:.1f} minutes; "
        f"policy {report.version}"
    )
    lines.append(f"report: {folder / 'report.json'}")
    if report.version.endswith("@0"):
        lines.append(f"nothing was learned so far: {report.version} is the base model")
    else:
        lines.append(f"serve it: art-backends serve --folder {folder}")
    return lines


def _reward(value: float | None) -> str:
    return "no reward" if value is None else f"reward {value:.2f}"


def _short(value: Any, limit: int = 200) -> str:
    """What a person wants to see of a scenario or a final state, in a line: the last message, or the JSON."""
    if isinstance(value, dict):
        messages = value.get("messages")
        if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
            calls = [call.get("function", {}) for call in messages[-1].get("tool_calls") or []]
            said = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
            value = " ".join([str(messages[-1].get("content") or ""), *said]).strip()
        elif isinstance(value.get("question"), str):
            value = value["question"]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


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
