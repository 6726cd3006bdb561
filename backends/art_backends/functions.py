"""Functions that a command line names: ``module:attr`` or ``path.py:attr``; and the app's errors as the app's.

It refuses to hide what a module raises while it is imported: the error comes with that module's own traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from art_backends.errors import ConfigError, did_you_mean


def find_from_here() -> None:
    """Let modules be found from the current folder, as with ``python -m``."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """A function by ``module:attr`` or ``path.py:attr``; ConfigError names the option and what was found instead.

    An error in the module comes with the module's own traceback.
    """
    place, separator, attribute = spec.rpartition(":")
    if not separator or not place or not attribute:
        raise ConfigError(f"{option} {spec}: give module:function, for example my_rewards:score")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ConfigError(f"{option} {spec}: there is no file {path}")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        place = path.stem
    try:
        value: Any = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{option} {spec}: there is no module {error.name!r} in {Path.cwd()} nor among the installed packages"
            ) from None
        _app_error(f"{option} {spec}", error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - boundary: the user's module, told with its traceback
        _app_error(f"{option} {spec}", error)
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            hint = did_you_mean(part, [name for name in dir(value) if not name.startswith("_")])
            raise ConfigError(f"{option} {spec}: {place} has no {attribute!r}{hint}") from None
    if not callable(value):
        raise ConfigError(f"{option} {spec}: this is a {type(value).__name__}, not a function")
    return value  # type: ignore[no-any-return]


def _app_error(what: str, error: BaseException) -> NoReturn:
    raise ConfigError(f"{what}: the module could not be imported:\n\n{own_traceback(error)}") from error


def own_traceback(error: BaseException, *ours: Path) -> str:
    """An error of the app's as Python shows it, without the frames of the import machinery and of our folders."""
    shown = traceback.TracebackException.from_exception(error)
    waiting = [shown]
    while waiting:
        part = waiting.pop()
        part.stack = traceback.StackSummary.from_list(
            [frame for frame in part.stack if not _between(frame.filename, ours)]
        )
        waiting += [more for more in (part.__cause__, part.__context__, *(part.exceptions or ())) if more is not None]
    return "".join(shown.format()).rstrip()


def _between(file: str, ours: tuple[Path, ...]) -> bool:
    """Whether a frame only stands between ours and the app's: ours, of imports, of context managers."""
    return (
        file.startswith(("<frozen importlib", "<frozen runpy", str(Path(importlib.__file__).parent)))
        or file == contextlib.__file__
        or Path(file).parent in (Path(__file__).parent, *ours)
    )
