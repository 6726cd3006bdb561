"""Adapter versions on disk: ``FOLDER/NAME@N``, each written once and never changed.

Listing, reading ``state.json``, sweeping what a killed process left, and the one commit point: files fsynced in a
temporary folder, one rename, the parent fsynced. Torch-free, so the server imports it too.

It refuses to interpret an adapter (see ``adapters``) and to overwrite a valid version.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_backends.trajectories import version_name, version_number

STATE = "state.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
FORMAT = 1
TEMPORARY = ".tmp-"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VersionInfo:
    """One valid version: its number, its folder and its ``state.json``."""

    version: int
    path: Path
    state: dict[str, Any]


def list_versions(folder: Path, policy: str) -> list[VersionInfo]:
    """Valid versions of a policy from 1 on, oldest first. Version 0 is the base model, or, where it has a folder, the
    adapter that the run began from; it is no step's and not listed.

    A folder whose state cannot be read is left out and logged: the version before it stays usable.
    """
    found = []
    for path in folder.glob(f"{policy}@*"):
        number = version_number(policy, path.name)
        if number:
            info = read_version(folder, policy, number)
            if info is not None:
                found.append(info)
    return sorted(found, key=lambda info: info.version)


def read_version(folder: Path, policy: str, version: int) -> VersionInfo | None:
    """One version, or None if it is not there or its state is unusable (which is logged)."""
    path = folder / version_name(policy, version)
    if not path.is_dir():
        return None
    try:
        state = json.loads((path / STATE).read_bytes())
    except (OSError, ValueError) as error:
        log.warning("%s: version left out, its %s cannot be read: %s", path, STATE, error)
        return None
    problem = _state_problem(state, policy, version)
    if problem is not None:
        log.warning("%s: version left out: %s", path, problem)
        return None
    return VersionInfo(version, path, state)


def files_problem(path: Path) -> str | None:
    """Why the adapter in a folder cannot be whole, or None: its files are there, and as long as they say they are.

    What the weights are worth is for ``adapters`` to say, which knows tensors.
    """
    try:
        json.loads((path / ADAPTER_CONFIG).read_bytes())
        with (path / ADAPTER_WEIGHTS).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            header = json.loads(file.read(min(length, size)))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is not there"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{ADAPTER_CONFIG} or {ADAPTER_WEIGHTS} is torn or no file of this kind"
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"{ADAPTER_WEIGHTS} has {size} bytes instead of {whole}"


def _state_problem(state: object, policy: str, version: int) -> str | None:
    if not isinstance(state, dict):
        return f"{STATE} is not an object"
    for key, expected in (("format", FORMAT), ("policy", policy), ("version", version)):
        if state.get(key) != expected:
            return f"{STATE} says {key} = {state.get(key)!r}, expected {expected!r}"
    if not isinstance(state.get("rollout_ids"), list):
        return f"{STATE} has no list of rollout_ids"
    return None


def sweep(folder: Path) -> int:
    """Remove temporary folders and files that a killed writer left; returns how many.

    Call it only while no trainer writes into this folder: at the start of the server and of the trainer.
    """
    swept = 0
    for path in folder.glob(TEMPORARY + "*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        swept += 1
    return swept


@contextmanager
def new_version(folder: Path, policy: str, version: int) -> Iterator[Path]:
    """An empty folder to write a version into: committed at the end of the block, removed if the block or that fails.

    Raises what ``commit`` does, and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = version_name(policy, version)
    temporary = folder / f"{TEMPORARY}{name}-{uuid.uuid4().hex[:8]}"  # the same file system: a rename is atomic
    temporary.mkdir()
    try:
        yield temporary
        commit(temporary, folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if it was committed


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync one file. Raises OSError (disk full, size limit); the file may then be partial."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def encode_json(value: object) -> bytes:
    """JSON whose bytes depend only on the value."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_numbers(path: Path) -> dict[str, float]:
    """A flat JSON object of numbers; empty if the file is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
        return {str(name): float(number) for name, number in value.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def replace_json(path: Path, value: object) -> None:
    """Replace a small JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        write_file(temporary, encode_json(value))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def commit(temporary: Path, final: Path) -> None:
    """Make a fully written temporary folder the version ``final``: the commit point of a training step.

    Raises FileExistsError if a valid version stands there; an unreadable one is replaced. Raises OSError when the
    file system refuses; then nothing was committed and ``temporary`` still exists.
    """
    _sync_folder(temporary)
    if final.exists():
        policy, _, number = final.name.rpartition("@")
        if read_version(final.parent, policy, int(number)) is not None:
            raise FileExistsError(f"{final} exists already")
        final.rename(final.parent / f"{TEMPORARY}broken-{final.name}-{uuid.uuid4().hex[:8]}")
    temporary.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
