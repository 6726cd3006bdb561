"""The one error tree of the project.

Every error that a user can meet is an ``ArtError``: its message names what was wrong, where, and what to do.
Each class is also the standard exception a caller would expect, and survives pickling (single message argument)::

    ArtError
    ├── ConfigError            (ValueError)       a setting, option or file of settings
    ├── ScenarioError          (ValueError)       a scenario file or a scenario
    ├── GraphError             (ValueError)       the user's graph could not be loaded
    ├── RewardError            (ValueError)       a reward function's value is unusable
    ├── ModelNotFoundError     (LookupError)      a base model; lists what was tried
    ├── TemplateError          (ValueError)       a chat template is missing or refuses the messages
    ├── FolderInUseError       (RuntimeError)     a second run on one folder
    ├── StoreError             (OSError)          the store cannot be read or written (disk full, wrong schema)
    ├── ServerError            (ConnectionError)  the server or the worker cannot be reached or did not start
    │   └── ControlError                          the control API refused a request (has .status and .code)
    ├── EngineError            (RuntimeError)     the engine answered with an error (has .status and .code)
    ├── AdapterError           (ValueError)       an adapter's files are unusable
    └── TrainingError          (RuntimeError)     a training step could not be made
        ├── NothingToLearnError                   no group has a spread of rewards, or no token can be trained
        └── NonFiniteError                        loss or gradient was NaN or infinite too often

It refuses to be a place for errors that are only data: a failed rollout is recorded, not raised.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ArtError(Exception):
    """Base of every error of this project."""


class ConfigError(ArtError, ValueError):
    """A setting, a command-line option or a file of settings is wrong."""


class ScenarioError(ArtError, ValueError):
    """A scenario, or a line of a scenario file, cannot be used."""


class GraphError(ArtError, ValueError):
    """The user's graph could not be loaded or is not a graph."""


class RewardError(ArtError, ValueError):
    """A reward function's value is not a finite number (or a mapping with one)."""


class ModelNotFoundError(ArtError, LookupError):
    """A base model could not be found; the message lists what was tried."""


class TemplateError(ArtError, ValueError):
    """A chat template is missing, or refuses the messages it was given."""


class FolderInUseError(ArtError, RuntimeError):
    """Another run holds the lock of this run folder."""


class StoreError(ArtError, OSError):
    """The store cannot be read or written."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ServerError(ArtError, ConnectionError):
    """The server or a child of it cannot be reached, or did not start."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class _CodedError(ArtError):
    """An error that a process on the other side of HTTP reported."""

    def __init__(self, message: str, status: int = 500, code: str = "error") -> None:
        super().__init__(message, status, code)
        self.status = status
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ControlError(_CodedError, ServerError):
    """The control API refused a request; ``status`` is its HTTP status, ``code`` a stable word."""


class EngineError(_CodedError, RuntimeError):
    """The engine refused or failed a request; ``status`` is its HTTP status, ``code`` OpenAI's error code."""


class AdapterError(ArtError, ValueError):
    """An adapter's files are unusable: truncated, of the wrong shape, not finite, or of another base model."""


class TrainingError(ArtError, RuntimeError):
    """A training step could not be made."""


class NothingToLearnError(TrainingError):
    """No group of the batch has a spread of rewards, or no call of it can be trained."""


class NonFiniteError(TrainingError):
    """Loss or gradient was NaN or infinite for several steps in a row."""


def revive(kind: str, message: str) -> ArtError:
    """The error that another process reported by class name and message; ServerError where the name is not known."""
    known = globals().get(kind)
    if isinstance(known, type) and issubclass(known, ArtError):
        return known(message)
    return ServerError(message)


def did_you_mean(given: str | Iterable[str], known: Iterable[str]) -> str:
    """The end of a message about names that are not known: ``; did you mean …?``, or nothing if none is similar."""
    there = sorted(known)
    found = [difflib.get_close_matches(name, there, n=1) for name in ([given] if isinstance(given, str) else given)]
    names = dict.fromkeys(name for match in found for name in match)
    return f"; did you mean {', '.join(names)}?" if names else ""
