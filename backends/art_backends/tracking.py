"""Where the figures of a run go: sinks, of which ``metrics.jsonl`` in the run folder is always one.

A row is a flat mapping; ``"step"`` is its training step. Each row is one line, written and fsynced before the next
step begins. A line that was torn by a crash is cut off at the next start; every whole line before it is kept.

It refuses to lose a run over a figure: a sink of the user's that raises is switched off with a warning. Only the
file itself is not optional: a full disk is a StoreError.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from art_backends.errors import StoreError

Row = dict[str, Any]


class Sink(Protocol):
    """Something that takes rows: a file, a tracker, a dashboard."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Append-only JSON Lines file of rows. ``rows`` are those that stood in it when it was opened."""

    def __init__(self, path: Path) -> None:
        """Open or make the file; a torn last line is cut off. StoreError if it cannot be read or written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.seek(0)
            self.rows, whole = _whole_rows(self._file.read())
            self._file.truncate(whole)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row durably. Numbers that JSON has no word for (NaN, infinity) become null."""
        line = json.dumps({key: _finite(value) for key, value in row.items()}, allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            # After a failed write or fsync nothing is known of the file's end: no retry, the next open repairs it.
            raise StoreError(f"{self.path}: {error.strerror or error}: free some space, then go on") from None

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """The whole rows of a metrics file, as far as they can be read; none if there is no file."""
    try:
        return _whole_rows(path.read_bytes())[0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from None


def _whole_rows(data: bytes) -> tuple[list[Row], int]:
    """The rows and the length in bytes of the intact beginning."""
    rows: list[Row] = []
    whole = 0
    for line in data.splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict):
            break
        rows.append(row)
        whole += len(line)
    return rows, whole


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
