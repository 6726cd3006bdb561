"""From rollouts and step outcomes to figures: the row of a step, an evaluation, the totals of a report.

Pure functions over plain data. It refuses to fill gaps: a rollout with a fault is counted as a fault and enters no
mean, and a figure of which nothing is known is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from art_backends.report import Evaluation, Example, Report, histogram, wilson
from art_backends.trajectories import Rollout, RolloutError, version_number

Row = dict[str, Any]

PATIENCE = 2  # evaluations that may be worse than the best one before there is an alarm
DIFFERENCE = "sampling/sampling_logp_difference"


def scored(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Those that count: closed, without a fault, with a reward."""
    return [rollout for rollout in rollouts if rollout.fault is None and rollout.reward is not None]


def rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [rollout.reward for rollout in scored(rollouts) if rollout.reward is not None]


def successes(rollouts: Sequence[Rollout]) -> list[float] | None:
    """Success of each scored rollout: the reward's "success" part, or the reward itself where all are 0 or 1."""
    counted = scored(rollouts)
    if not counted:
        return None
    named = [rollout.metrics["success"] for rollout in counted if "success" in rollout.metrics]
    if named:
        # A part that some runs lack is not 0 there: the share would mean something else for each step.
        return named if len(named) == len(counted) else None
    plain = rewards(rollouts)
    return plain if set(plain) <= {0.0, 1.0} else None


def mean(values: Sequence[float] | None) -> float | None:
    return fmean(values) if values else None


def common_error(rollouts: Iterable[Rollout]) -> str | None:
    """The agent's most frequent error in a line, with its count."""
    counts = Counter(_in_a_line(rollout.error) for rollout in rollouts if rollout.error is not None)
    if not counts:
        return None
    text, number = counts.most_common(1)[0]
    return f"{text} (×{number})"


def _in_a_line(error: RolloutError) -> str:
    """Type and first line: what follows is advice, or a traceback, which the rollout has whole."""
    said = error.message.strip().splitlines()
    return f"{error.type}: {said[0][:300]}" if said else error.type


def evaluation(step: int, version: str, rollouts: Sequence[Rollout]) -> Evaluation:
    """One pass over the held-out scenarios in figures."""
    counted = scored(rollouts)
    return Evaluation(
        step=step,
        version=version,
        scenarios=len(counted),
        reward=mean(rewards(rollouts)),
        success=mean(successes(rollouts)),
        errors=sum(rollout.error is not None for rollout in counted),
        faults=len(rollouts) - len(counted),
    )


def last_reward(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """The identity of the reward that the newest figures are of."""
    judges = [row["scored_by"] for row in rows if row.get("scored_by")]
    return judges[-1] if judges else None


def evaluation_row(passed: Evaluation, scored_by: str) -> Row:
    return {
        "scored_by": scored_by,
        "evaluation": passed.step,
        "version": passed.version,
        "held_out/reward": passed.reward,
        "held_out/success": passed.success,
        "held_out/scenarios": passed.scenarios,
        "held_out/errors": passed.errors,
        "held_out/faults": passed.faults,
    }


def evaluations(rows: Iterable[Mapping[str, Any]], newest: int, scored_by: str | None) -> dict[int, Evaluation]:
    """The evaluations of a run that was stopped, by step.

    Those of versions beyond ``newest`` are left out, those of a version that was made anew afterwards, and those by
    another reward.
    """
    found: dict[int, Evaluation] = {}
    for row in rows:
        if row.get("outcome") == "committed":
            found = {at: old for at, old in found.items() if not old.version.endswith(f"@{row.get('version')}")}
        version = str(row.get("version", "")).rpartition("@")[2]
        mine = isinstance(row.get("evaluation"), int) and row.get("scored_by") == scored_by
        if mine and version.isdecimal() and int(version) <= newest:
            found[row["evaluation"]] = Evaluation(
                step=row["evaluation"],
                version=row["version"],
                scenarios=row.get("held_out/scenarios") or 0,
                reward=row.get("held_out/reward"),
                success=row.get("held_out/success"),
                errors=row.get("held_out/errors") or 0,
                faults=row.get("held_out/faults") or 0,
            )
    return dict(sorted(found.items()))


def step_row(step: int, rollouts: Sequence[Rollout], outcome: Mapping[str, Any]) -> Row:
    """A step in figures. ``outcome`` has kind, version (a number), reason and the trainer's metrics."""
    counted = scored(rollouts)
    values = rewards(rollouts)
    row: Row = {"step": step, "outcome": outcome["kind"], "version": outcome["version"]}
    judges = {rollout.scored_by for rollout in counted}
    if len(judges) == 1 and None not in judges:
        row["scored_by"] = judges.pop()
    if outcome.get("reason"):
        row["reason"] = outcome["reason"]
    row |= {key: value for key, value in (outcome.get("metrics") or {}).items() if value is not None}
    row |= {
        "rollouts": len(rollouts),
        "errors": sum(rollout.error is not None for rollout in counted),
        "faults": len(rollouts) - len(counted),
        "reward": mean(values),
        "reward_std": pstdev(values) if values else None,
        "success": mean(successes(rollouts)),
        "rewards": histogram(values),
    }
    newest = outcome["version"] - (outcome["kind"] == "committed")
    ages = [newest - number for r in counted if (number := version_number(r.policy, r.version)) is not None]
    if ages:
        row |= {"staleness/mean": fmean(ages), "staleness/max": max(ages)}
    row["stale"] = sum(reason == "stale" for reason in (outcome.get("excluded") or {}).values())
    named: dict[str, list[float]] = defaultdict(list)
    for rollout in counted:
        for name, value in rollout.metrics.items():
            named[name].append(value)
    return row | {f"reward/{name}": fmean(part) for name, part in sorted(named.items())}


def by_step(rows: Iterable[Mapping[str, Any]], newest: int) -> dict[int, Row]:
    """The rows of training steps; a later row of a step wins, rows of versions beyond ``newest`` were never served."""
    found = {row["step"]: dict(row) for row in rows if isinstance(row.get("step"), int) and "outcome" in row}
    return {step: row for step, row in sorted(found.items()) if int(row.get("version", 0)) <= newest}


def reached(rows: Sequence[Mapping[str, Any]], target: float | None, steps: int) -> bool:
    """Whether the last ``steps`` steps sampled at least ``target`` success in the mean.

    A step has few scenarios, so that one which fails in all its rollouts weighs much: the mean of several says more.
    """
    last = [row["success"] for row in rows[-steps:] if row.get("success") is not None]
    return target is not None and len(last) == steps and fmean(last) >= target


def parted(evaluations: Sequence[Evaluation], rows: Iterable[Mapping[str, Any]]) -> str | None:
    """An alarm in words when the sampled reward rose since the best evaluation and the held-out reward did not.

    That is what learning the training scenarios by heart looks like, and so does a way around the reward that the
    held-out scenarios do not have. The best must be PATIENCE evaluations old (or the first of two). The rise is that of
    the last quarter of the steps since then over their first, and must exceed two standard errors of the difference.
    """
    known = [passed for passed in evaluations if passed.reward is not None]
    if len(known) < 2:
        return None
    at = max(range(len(known)), key=lambda index: (known[index].reward or 0.0, -index))
    best, last = known[at], known[-1]
    since = [row for row in rows if row.get("reward") is not None and best.step < row["step"] <= last.step]
    if len(known) - 1 - at < min(PATIENCE, len(known) - 1) or len(since) < 2:
        return None
    part = max(1, len(since) // 4)
    (was, was_error), (now, now_error) = _sampled(since[:part]), _sampled(since[-part:])
    if now - was <= 2 * math.hypot(was_error, now_error):
        return None
    return (
        f"the sampled reward rose from {was:.3f} to {now:.3f} since {best.version}, the held-out reward went from "
        f"{best.reward:.3f} to {last.reward:.3f}: the agent may be learning the training scenarios by heart, or a way "
        f"around the reward. Look at rollouts of the last step; the best version so far is {best.version}"
    )


def _sampled(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean sampled reward of some steps, and its standard error."""
    variance = fmean((row.get("reward_std") or 0.0) ** 2 for row in rows)
    return fmean(row["reward"] for row in rows), math.sqrt(variance / sum(max(row["rollouts"], 1) for row in rows))


def examples(before: Sequence[Rollout], after: Sequence[Rollout], limit: int = 5) -> list[Example]:
    """Held-out scenarios before and after, those with the largest change of reward first, better or worse."""
    first = {rollout.group: rollout for rollout in scored(before)}
    pairs = [(first[rollout.group], rollout) for rollout in scored(after) if rollout.group in first]
    pairs.sort(key=lambda pair: -abs((pair[1].reward or 0.0) - (pair[0].reward or 0.0)))
    return [
        Example(old.scenario, old.output, new.output, old.reward, new.reward, _error(old), _error(new))
        for old, new in pairs[: max(limit, 0)]
    ]


def fill(
    report: Report, rows: Sequence[Row], parts: Sequence[Row], before: Sequence[Rollout], after: Sequence[Rollout]
) -> None:
    """Fill a report's figures from the rows of its steps, all rows (for the seconds), and the held-out rollouts."""
    for name, value in (("base", before), ("trained", after)):
        setattr(report, f"{name}_success", mean(successes(value)))
        setattr(report, f"{name}_reward", mean(rewards(value)))
    for name, value in (("base_confidence_interval", before), ("confidence_interval", after)):
        shares = successes(value)
        setattr(report, name, wilson(sum(shares), len(shares)) if shares else None)
    report.held_out = len(after)
    report.examples = examples(before, after)
    report.steps = len(rows)
    report.skipped_steps = sum(row["outcome"] == "skipped" for row in rows)
    report.train_seconds = _total(parts, "seconds")
    for name in ("rollouts", "errors", "faults"):
        setattr(report, name, int(_total(rows, name)))
    unique = _total(rows, "tokens/unique")
    report.computed_to_unique_tokens = _total(rows, "tokens/computed") / unique if unique else None
    trained = _total(rows, "tokens/trained")
    report.trained_tokens = int(trained)
    weighted = [
        (row[f"{DIFFERENCE}/mean"], row.get("tokens/trained") or 0)
        for row in rows
        if row.get(f"{DIFFERENCE}/mean") is not None
    ]
    weight = sum(tokens for _, tokens in weighted)
    report.mean_abs_logprob_difference = sum(value * tokens for value, tokens in weighted) / weight if weight else None
    report.max_abs_logprob_difference = max(
        (row[f"{DIFFERENCE}/max"] for row in rows if row.get(f"{DIFFERENCE}/max") is not None), default=None
    )
    busy = _total(parts, "engine/busy_seconds")
    report.engine_tokens_per_second = _total(parts, "engine/tokens_sampled") / busy if busy else None


def _total(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    return float(sum(row.get(name) or 0 for row in rows))


def _error(rollout: Rollout) -> str | None:
    return None if rollout.error is None else f"{rollout.error.type}: {rollout.error.message[:1000]}"
