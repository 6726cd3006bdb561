"""Version 0 of a run that does not begin from the bare base model: a copy of the adapter it begins from.

The copy makes the run independent of where the adapter came from. It refuses an adapter of other settings than the
run's, or of another base model; shapes and values are checked by whoever loads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from art_backends.config import TrainConfig
from art_backends.errors import ConfigError
from art_backends.training import versions
from art_backends.training.versions import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def check(config: TrainConfig, folder: Path, digest: str | None = None) -> Path | None:
    """The adapter to begin from, if it still has to be copied to ``folder``; ConfigError if it cannot be used.

    ``digest`` is the base model's, where it is known already.
    """
    if config.init_adapter is None or versions.read_version(folder, config.name, 0) is not None:
        return None
    source = config.init_adapter.expanduser().absolute()
    if not source.is_dir():
        beside = sorted(path.parent.name for path in source.parent.glob(f"*/{ADAPTER_CONFIG}"))
        there = f"; beside it are: {', '.join(beside)}" if beside else ""
        raise ConfigError(f"init_adapter: there is no folder {source}{there}")
    settings = _object(source / ADAPTER_CONFIG)
    if not (source / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(
            f"init_adapter: {source} has no {ADAPTER_WEIGHTS}: give the folder of a LoRA in PEFT's format"
        )
    _check_settings(config, settings, source)
    made_from = _object(source / versions.STATE).get("base_digest") if (source / versions.STATE).exists() else None
    if digest is not None and made_from is not None and made_from != digest:
        raise ConfigError(f"init_adapter: {source} was trained on another base model (digest {str(made_from)[:12]}…)")
    return source


def place(config: TrainConfig, folder: Path, digest: str) -> None:
    """Make ``folder/NAME@0`` of ``config.init_adapter``, unless it is there. ``digest`` is the base model's."""
    source = check(config, folder, digest)
    if source is None:
        return
    state = {
        "format": versions.FORMAT,
        "policy": config.name,
        "version": 0,
        "step": 0,
        "rollout_ids": [],
        "metrics": {},
        "base_digest": digest,
    }
    try:
        with versions.new_version(folder, config.name, 0) as place:
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                versions.write_file(place / name, (source / name).read_bytes())
            versions.write_file(place / versions.STATE, versions.encode_json(state))
    except OSError as error:
        raise ConfigError(f"init_adapter: {source} could not be copied to {folder}: {error.strerror}") from None


def _check_settings(config: TrainConfig, settings: dict[str, Any], source: Path) -> None:
    targets = settings.get("target_modules")
    theirs = {
        "rank": settings.get("r"),
        "alpha": settings.get("lora_alpha"),
        "rslora": bool(settings.get("use_rslora")),
        "target_modules": sorted(targets) if isinstance(targets, list) else targets,
    }
    ours = {**config.model_dump(include={"rank", "alpha", "rslora"}), "target_modules": sorted(config.target_modules)}
    other = {name: value for name, value in theirs.items() if value != ours[name]}
    if other:
        said = "; ".join(
            f"{name}: the adapter {source} has {value!r}, this run {ours[name]!r}" for name, value in other.items()
        )
        raise ConfigError(f"{said}; use the adapter's: {' '.join(_option(*item) for item in other.items())}")


def _option(name: str, value: Any) -> str:
    """A setting as it is given on a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {' '.join(value) if isinstance(value, list) else value}"


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"init_adapter: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"init_adapter: {path} holds no object")
    return content
