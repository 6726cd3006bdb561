"""Scenarios: read them from JSON Lines, name them, split them, put them in an order.

A scenario is any JSON object. Its id is its ``"id"`` (text or a whole number), or else a hash of its content.
The order of a run is a pure function of the seed and the step number: nothing is stored, so a run that was killed
goes on exactly where it stood, on any machine and any Python.

It refuses to guess: a line that cannot be used is an error that names file and line, never a skipped scenario.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from art_backends.errors import ConfigError, ScenarioError

_LONGEST_ID = 200  # characters
_KINDS = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}


@dataclass(frozen=True)
class Scenario:
    """One task input: its id and the JSON object itself, exactly as it was given."""

    id: str
    data: dict[str, Any]


Scenarios: TypeAlias = "str | Path | Iterable[Mapping[str, Any] | Scenario]"


def load(source: Scenarios, *, what: str = "scenario", distinct: bool = True) -> list[Scenario]:
    """Scenarios of a JSON Lines file or of objects in memory; ScenarioError names what cannot be used and where.

    ``what``: what one is called in errors; ``distinct``: whether none may come twice.
    """
    if isinstance(source, str | Path):
        rows = _rows(Path(source), what)
        place = str(source)
    elif isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise ScenarioError(f"{what}s must be a file or a list of objects, not {_kind(source)}")
    else:
        rows, place = [], f"the list of {what}s"
        for index, item in enumerate(source):
            where = f"{what} {index}"
            rows.append((where, item if isinstance(item, Scenario) else _scenario(item, where, what)))
    if not rows:
        raise ScenarioError(f"{place}: no {what}s: write one JSON object per line")
    if distinct:
        _check_distinct(rows)
    return [scenario for _, scenario in rows]


def _rows(path: Path, what: str) -> list[tuple[str, Scenario]]:
    """Places and scenarios of a file with one JSON object per line; blank lines are allowed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror or error}") from None
    rows: list[tuple[str, Scenario]] = []
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ScenarioError(f"{where}: not UTF-8 (byte {error.start}): save the file as UTF-8") from None
        if text.strip():
            rows.append((where, _scenario(_parse(text, where), where, what)))
    return rows


def prepared(
    scenarios: Scenarios, held_out: Scenarios | float | None, seed: int
) -> tuple[list[Scenario], list[Scenario]]:
    """(to train on, held out). ScenarioError if a scenario cannot be used; ConfigError if one is in both."""
    training = load(scenarios)
    if held_out is None:
        return training, []
    if isinstance(held_out, int | float):
        return split(training, held_out, seed)
    testing = load(held_out)
    known = {scenario.id: scenario for scenario in training}
    both = [scenario.id for scenario in testing if scenario.id in known and known[scenario.id].data == scenario.data]
    if both:
        raise ConfigError(
            f"{len(both)} held-out scenarios are among those to train on ({', '.join(both[:3])}): "
            "success would be measured on what was learned by heart"
        )
    return training, testing


def file_or_share(value: str | None) -> str | float | None:
    """What ``--held-out`` says: a file, or a share of the scenarios."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def split(scenarios: list[Scenario], fraction: float, seed: int) -> tuple[list[Scenario], list[Scenario]]:
    """(to train on, held out): a share of the scenarios chosen by seed and id, the same ones on every resume.

    At least one scenario stays on each side; ScenarioError if there are fewer than two or the fraction is no share.
    """
    if not 0 < fraction < 1:
        raise ScenarioError(
            "what is held out must be a share between 0 and 1 (0.2 is a fifth) or a file of scenarios, "
            f"not {fraction:g}"
        )
    if len(scenarios) < 2:
        raise ScenarioError("one scenario cannot be split: give at least two, or a file of held-out scenarios")
    count = min(max(round(len(scenarios) * fraction), 1), len(scenarios) - 1)
    ranked = sorted(scenarios, key=lambda scenario: _digest(f"held-out:{seed}:{scenario.id}"))
    chosen = {scenario.id for scenario in ranked[:count]}
    return [s for s in scenarios if s.id not in chosen], [s for s in scenarios if s.id in chosen]


def order(seed: int | str, step: int, groups_per_step: int, count: int, *, shuffle: bool = True) -> list[int]:
    """Indices (0 ≤ i < count) of the scenarios of a training step (from 1), ``groups_per_step`` of them.

    Steps read one endless stream of epochs; a step may span two. Each epoch is a fresh permutation of all scenarios,
    or, without ``shuffle``, the scenarios as they were given: whoever knows the kinds of tasks can so put some of
    each kind into every step, which keeps an update from favouring the kind that happened to come.
    """
    if step < 1 or groups_per_step < 1 or count < 1:
        raise ScenarioError(f"no order for step {step}, {groups_per_step} groups per step, {count} scenarios")
    first = (step - 1) * groups_per_step
    if not shuffle:
        return [at % count for at in range(first, first + groups_per_step)]
    return [_permutation(seed, at // count, count)[at % count] for at in range(first, first + groups_per_step)]


@lru_cache(maxsize=4)
def _permutation(seed: int | str, epoch: int, count: int) -> tuple[int, ...]:
    # Sorted by a hash rather than shuffled: random.shuffle promises no stable result between Python versions.
    return tuple(sorted(range(count), key=lambda index: _digest(f"order:{seed}:{epoch}:{index}")))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _parse(text: str, where: str) -> Any:
    def no_constant(name: str) -> NoReturn:
        raise ScenarioError(f"{where}: {name} is not JSON")

    try:
        return json.loads(text, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise ScenarioError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ScenarioError(f"{where}: nested too deeply") from None


def _scenario(value: Any, where: str, what: str) -> Scenario:
    if not isinstance(value, Mapping):
        raise ScenarioError(f"{where}: each {what} must be a JSON object, this is {_kind(value)}")
    data = dict(value)
    try:
        content = json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ScenarioError(f"{where}: holds half of a surrogate pair (\\ud800…), which is not text") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ScenarioError(f"{where}: not a JSON object: {error}") from None
    given = data.get("id")
    if given is None:
        return Scenario(hashlib.sha256(content).hexdigest()[:16], data)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise ScenarioError(f'{where}: "id" must be text or a whole number, this is {given!r}')
    if len(str(given)) > _LONGEST_ID:
        raise ScenarioError(f'{where}: "id" is longer than {_LONGEST_ID} characters')
    return Scenario(str(given), data)


def _check_distinct(rows: list[tuple[str, Scenario]]) -> None:
    seen: dict[str, str] = {}
    for where, scenario in rows:
        if scenario.id in seen:
            what = f"id {scenario.id!r} repeats" if "id" in scenario.data else "the same content as"
            raise ScenarioError(f"{where}: {what} {seen[scenario.id]}")
        seen[scenario.id] = where


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")
