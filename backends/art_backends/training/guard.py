"""How many steps in a row were skipped because a loss or a gradient was not finite; survives a restart.

One small JSON file beside the versions, ``NAME.guard.json``: skipping must not touch a version. It counts the loop's
step numbers, so that repeating a step after a crash does not count twice. Torch-free. It refuses to decide what to
do about it.
"""

from __future__ import annotations

import json
from pathlib import Path

from art_backends.training import versions

LIMIT = 3  # steps in a row


def _path(folder: Path, policy: str) -> Path:
    return folder / f"{policy}.guard.json"


def skipped(folder: Path, policy: str) -> list[int]:
    """Numbers of the last steps in a row that were skipped as not finite, sorted."""
    try:
        value = json.loads(_path(folder, policy).read_bytes())
        return sorted({int(step) for step in value["non_finite_steps"]})
    except (OSError, ValueError, KeyError, TypeError):
        return []  # no file: nothing was skipped; a damaged one only delays the stop


def add(folder: Path, policy: str, step: int) -> int:
    """Record a skipped step; returns how many there are in a row. Raises OSError."""
    steps = sorted({*skipped(folder, policy), step})
    versions.replace_json(_path(folder, policy), {"non_finite_steps": steps})
    return len(steps)


def clear(folder: Path, policy: str) -> None:
    """A finite step ends the row."""
    _path(folder, policy).unlink(missing_ok=True)
