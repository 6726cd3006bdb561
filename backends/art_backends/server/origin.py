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


def place(config: TrainConfig, folder: Path, digest: str) -> None:
    """Make ``folder/NAME@0`` of ``config.init_adapter``, unless it is there. ``digest`` is the base model's."""
    if config.init_adapter is None or versions.read_version(folder, config.name, 0) is not None:
        return
    source = config.init_adapter.expanduser().absolute()
    settings = _object(source / ADAPTER_CONFIG)
    if not (source / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(
            f"init_adapter: {source} has no {ADAPTER_WEIGHTS}: give the folder of a LoRA in PEFT's format"
        )
    _check(config, settings, source)
    made_from = _object(source / versions.STATE).get("base_digest") if (source / versions.STATE).exists() else None
    if made_from is not None and made_from != digest:
        raise ConfigError(f"init_adapter: {source} was trained on another base model (digest {str(made_from)[:12]}…)")
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


def _check(config: TrainConfig, settings: dict[str, Any], source: Path) -> None:
    targets = settings.get("target_modules")
    theirs = {
        "rank": settings.get("r"),
        "alpha": settings.get("lora_alpha"),
        "rslora": bool(settings.get("use_rslora")),
        "target_modules": sorted(targets) if isinstance(targets, list) else targets,
    }
    ours = {**config.model_dump(include={"rank", "alpha", "rslora"}), "target_modules": sorted(config.target_modules)}
    for name, value in theirs.items():
        if value != ours[name]:
            raise ConfigError(f"{name}: the adapter {source} has {value!r}, this run {ours[name]!r}; use the adapter's")


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"init_adapter: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"init_adapter: {path} holds no object")
    return content
