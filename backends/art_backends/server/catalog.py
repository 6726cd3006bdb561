"""The versions of a run folder, while no server runs on it: list, compare, pin, roll back, prune, export for PEFT.

A version is never changed. Pinning fixes the alias, so that apps are answered by one version while training goes on
to newer ones. Rolling back sets the later ones aside, pruning removes whole folders, exporting copies.
What a version is worth is read from ``metrics.jsonl``; the best is the one of the highest held-out reward, or, where
nothing was held out, of the highest reward of its step.

It refuses to touch a folder whose server runs (see ``RunFolder``), to remove the newest, the best or the pinned
version, and to write into a folder that holds anything.
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from art_backends.errors import ConfigError
from art_backends.models import PACKAGES
from art_backends.report import Evaluation
from art_backends.server.folder import PolicyFile, read_pin, write_pin
from art_backends.summary import evaluations, last_reward
from art_backends.tracking import read_metrics
from art_backends.training import versions
from art_backends.training.versions import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from art_backends.trajectories import version_name

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Entry:
    """One version and what is known of it; None where nothing is."""

    version: int
    path: Path
    step: int
    bytes: int
    reward: float | None  # of the rollouts that the step learned from
    held_out_reward: float | None
    held_out_success: float | None
    state: dict[str, Any]
    problem: str | None = None  # why its adapter cannot be read, if so

    @property
    def worth(self) -> tuple[bool, float]:
        """What the best version has most of: a held-out reward counts before any other."""
        held = self.held_out_reward
        return held is not None, (held if held is not None else self.reward) or 0.0


@dataclass(frozen=True)
class Catalog:
    """All versions of a run folder, oldest first."""

    folder: Path
    policy: str
    base_model: str
    digest: str
    entries: list[Entry]
    base: Evaluation | None = None  # the base model's own, where something was held out

    @property
    def beaten(self) -> bool:
        """Whether the base model, with nothing learned, has a higher held-out reward than every version."""
        best = self.best
        if best is None or best.held_out_reward is None or self.base is None or self.base.reward is None:
            return False
        return self.base.reward > best.held_out_reward

    @property
    def pinned(self) -> int | None:
        """The version that the alias is fixed to, if any; ConfigError if that cannot be read."""
        return read_pin(self.folder)

    def sound(self, version: int) -> Entry:
        """``entry``; ConfigError as well if its files are damaged."""
        entry = self.entry(version)
        if entry.problem is not None:
            raise ConfigError(f"{self.policy}@{version} is damaged: {entry.problem}")
        return entry

    def entry(self, version: int) -> Entry:
        """ConfigError, naming those there are, if there is no such version."""
        for entry in self.entries:
            if entry.version == version:
                return entry
        known = ", ".join(f"@{entry.version}" for entry in self.entries) or "none"
        raise ConfigError(f"{self.folder} has no version {self.policy}@{version}; there are: {known}")

    @property
    def newest(self) -> Entry | None:
        return self.entries[-1] if self.entries else None

    @property
    def best(self) -> Entry | None:
        """The most worth, the newer one of equals."""
        known = [entry for entry in self.entries if entry.held_out_reward is not None or entry.reward is not None]
        known = [entry for entry in known if entry.problem is None]
        return max(known, key=lambda entry: (*entry.worth, entry.version), default=None)


def read(folder: Path) -> Catalog:
    """The catalog of a run folder; ConfigError if it is none."""
    policy = PolicyFile.read(folder)
    if policy is None:
        raise ConfigError(f"{folder} is no run folder: it has no policy.json")
    name = str(policy.fixed["name"])
    rows = read_metrics(folder / METRICS)
    judge = last_reward(rows)  # figures by another reward cannot be compared with its
    made = [row for row in rows if "step" in row and row.get("outcome") == "committed"]
    rewards = {row["version"]: row.get("reward") if row.get("scored_by") == judge else None for row in made}
    found = versions.list_versions(folder / "versions", name)
    newest = max([0, *(info.version for info in found)])
    held = {passed.version: passed for passed in evaluations(rows, newest, judge).values()}
    begun = versions.read_version(folder / "versions", name, 0)
    entries = []
    for info in ([begun] if begun is not None else []) + found:
        evaluation = held.get(version_name(name, info.version))
        entries.append(
            Entry(
                version=info.version,
                path=info.path,
                step=int(info.state.get("step", info.version)),
                bytes=sum(file.stat().st_size for file in info.path.iterdir() if file.is_file()),
                reward=rewards.get(info.version, info.state.get("metrics", {}).get("reward")),
                held_out_reward=None if evaluation is None else evaluation.reward,
                held_out_success=None if evaluation is None else evaluation.success,
                state=info.state,
                problem=versions.files_problem(info.path),
            )
        )
    base = held.get(version_name(name, 0)) if begun is None else None
    return Catalog(folder, name, policy.base_model, policy.digest, entries, base)


def compare(one: Entry, other: Entry) -> list[tuple[str, Any, Any]]:
    """What differs between two versions: settings they were made with and figures, (name, one's, other's)."""
    rows: list[tuple[str, Any, Any]] = []
    for name in ("step", "reward", "held_out_reward", "held_out_success"):
        rows.append((name, getattr(one, name), getattr(other, name)))
    settings, others = one.state.get("config", {}), other.state.get("config", {})
    rows += [
        (name, settings.get(name), others.get(name))
        for name in sorted({*settings, *others})
        if settings.get(name) != others.get(name)
    ]
    measured, more = one.state.get("metrics", {}), other.state.get("metrics", {})
    rows += [(name, measured.get(name), more.get(name)) for name in sorted({*measured, *more} - {"reward"})]
    return [row for row in rows if not _same(row[1], row[2])]


def figure(value: Any, digits: int = 4) -> str:
    """A figure for people: rounded to so many digits, a whole number whole, nothing as a dash."""
    if value is None:
        return "–"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if abs(value) >= 10**digits - 0.5 or value.is_integer():
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def figures(one: Any, other: Any) -> tuple[str, str]:
    """Two figures that differ, with as many digits as it takes to see it."""
    for digits in (4, 6, 10):
        shown = figure(one, digits), figure(other, digits)
        if shown[0] != shown[1]:
            return shown
    return str(one), str(other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)  # a mean of the same numbers, summed in another order
    return bool(one == other)


def pin(catalog: Catalog, version: int | None) -> None:
    """Let the alias stay at ``version`` from the server's next start on; None: let it follow the newest one again."""
    if version:
        catalog.sound(version)
    write_pin(catalog.folder, version)


def roll_back(catalog: Catalog, to: int) -> list[Path]:
    """Make ``to`` the newest version; the later ones are set aside. Returns where they are now.

    The steps that made them are made anew by the next run on this folder. Version 0 is what the run began from.
    """
    if to != 0:
        catalog.entry(to)
    pinned = catalog.pinned
    if pinned is not None and pinned > to:
        raise ConfigError(f"{catalog.policy}@{pinned} is pinned and would be set aside: unpin it first")
    aside = []
    for entry in reversed(catalog.entries):  # the newest first: wherever this is cut short, the rest is a whole run
        if entry.version > to:
            place = entry.path.with_name(f"aside-{entry.path.name}-{uuid.uuid4().hex[:8]}")
            entry.path.rename(place)
            aside.append(place)
    return aside


def prune(catalog: Catalog, keep: int) -> list[Entry]:
    """Remove all versions but the newest ``keep``, the best, the pinned, and version 0. Returns those removed."""
    if keep < 1:
        raise ConfigError("at least the newest version is kept: --keep must be 1 or more")
    kept = {entry.version for entry in catalog.entries[-keep:]} | {0, catalog.pinned}
    if catalog.best is not None:
        kept.add(catalog.best.version)
    removed = [entry for entry in catalog.entries if entry.version not in kept]
    for entry in removed:
        gone = entry.path.with_name(f"{versions.TEMPORARY}pruned-{entry.path.name}-{uuid.uuid4().hex[:8]}")
        entry.path.rename(gone)  # at once: a folder that is half removed is no version
        shutil.rmtree(gone)
    return removed


def export_adapter(catalog: Catalog, version: int, out: Path) -> None:
    """Write the adapter to ``out`` as PEFT and vLLM load it, with a model card and without any local path."""
    entry = catalog.sound(version)
    empty(out)
    base = public_name(catalog.base_model)
    settings = json.loads((entry.path / ADAPTER_CONFIG).read_bytes())
    settings["base_model_name_or_path"] = base
    (out / ADAPTER_CONFIG).write_bytes(versions.encode_json(settings))
    shutil.copyfile(entry.path / ADAPTER_WEIGHTS, out / ADAPTER_WEIGHTS)
    (out / "README.md").write_text(card(catalog, entry, "adapter"))


def empty(out: Path) -> None:
    """Make ``out``; ConfigError if something is in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"{out} is not empty: give a new folder")
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}") from None


def public_name(base_model: str) -> str:
    """The base model's name without a path of this machine: a hub name, or the folder's own name."""
    for package in PACKAGES:
        if base_model == package.spec:
            return package.model
    path = Path(base_model).expanduser()
    return path.name if path.is_absolute() or path.exists() or base_model.startswith((".", "~")) else base_model


def gguf_name(catalog: Catalog, entry: Entry) -> str:
    """What a GGUF export is called, without ``.gguf``."""
    return f"{catalog.policy}-{entry.version}"


def card(catalog: Catalog, entry: Entry, form: Literal["adapter", "merged", "gguf"]) -> str:
    """A model card in Markdown for what an export of this form holds."""
    base = public_name(catalog.base_model)
    config = entry.state.get("config", {})
    file = f"{gguf_name(catalog, entry)}.gguf"
    library, what, use = {
        "adapter": (
            "peft",
            f"LoRA adapter, rank {config.get('rank', 'unknown')}",
            f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "THIS_FOLDER")',
        ),
        "merged": ("transformers", "merged weights", 'AutoModelForCausalLM.from_pretrained("THIS_FOLDER")'),
        "gguf": (
            "gguf",
            "merged weights, not quantised,",
            f'AutoModelForCausalLM.from_pretrained("THIS_FOLDER", gguf_file="{file}")',
        ),
    }[form]
    known = {
        "training steps": entry.step,
        "reward of the last step's rollouts": entry.reward,
        "held-out reward": entry.held_out_reward,
        "held-out success": entry.held_out_success,
        "learning rate": config.get("learning_rate"),
        "SHA-256 of the base model's weight files": catalog.digest,
    }
    lines = ["---", f"base_model: {base}", f"library_name: {library}", "tags:", "- lora"]
    lines += ["- grpo", "---", "", f"# {catalog.policy}, version {entry.version}", ""]
    lines += [f"{what} of `{base}`, trained in place with art-inplace.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {figure(value)} |" for name, value in known.items() if value is not None]
    if form == "gguf":
        lines += ["", "llama.cpp, with an OpenAI-compatible API or to talk to in a terminal:", "", "```sh"]
        lines += [f"llama-server -m {file} --jinja", f"llama-cli -m {file} --jinja", "```", "", "transformers:"]
    lines += ["", "```python", use, "```", ""]
    if form == "adapter":
        lines += [
            "vLLM: `--enable-lora --lora-modules NAME=THIS_FOLDER`. If the base model's own chat template shows no",
            "tools to the model, add `--chat-template` with the `chat_template.jinja` of a merged export: the one",
            "that was trained with.",
            "",
        ]
    lines += ["The base model's licence holds for these weights too.", ""]
    return "\n".join(lines)
