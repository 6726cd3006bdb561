"""Which reward it is: a name and a digest of what it does, so that figures of two rewards are never compared.

``identity`` follows a function as far as it is the user's own code: its instructions and constants, its defaults and
what it closes over, the functions and classes it names, in its own and in the user's other modules, and the plain
data (numbers, text, containers of them) that it reads there. Comments, line numbers and annotations do not count.

A reward that keeps something in a container or an attribute between two trainings of one process is another one
afterwards: rather measured anew than compared wrongly.

It refuses to run anything, and to look into installed packages and Python itself: of those the name counts. It does not
see what a reward reads from files or asks of a service; who changes that uses a new run folder.
"""

from __future__ import annotations

import dis
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(Ellipsis),
    Decimal,
    Fraction,
    PurePath,
    date,
    timedelta,
)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_WRAPPERS = (partial, MethodType, staticmethod, classmethod, property, re.Pattern)
_INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})


def identity(reward: Callable[..., Any], success: Callable[..., Any] | None = None) -> str:
    """``module:name#digest`` of a reward, and of the function that judges success if there is one."""
    return " and ".join(_named(function) for function in (reward, success) if function is not None)


def change(before: str, now: str) -> str:
    """How one identity differs from another, in words."""
    was, is_now = (re.sub(r"#[0-9a-f]+", "", given) for given in (before, now))
    return f"{is_now}, or what it uses, has changed" if was == is_now else f"it was {was} and is {is_now} now"


def _named(function: Callable[..., Any]) -> str:
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    shown = inner if hasattr(inner, "__qualname__") else type(inner)
    name = f"{shown.__module__}:{shown.__qualname__}".replace("__main__:", "").replace("<locals>.", "")
    digest = hashlib.blake2b(digest_size=6)
    for part in _parts(function):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return f"{name}#{digest.hexdigest()}"


def _parts(whole: Any) -> Iterator[str]:
    """What makes up a value, as texts that are the same in every process."""
    followed: dict[int, Any] = {}  # by id; held, for the id of what is gone is given to another
    waiting = [whole]
    while waiting:
        value = waiting.pop()
        try:
            texts, inside = _look(value, followed)
        except Exception:  # noqa: BLE001 - boundary: an object of the user's that does not let itself be looked at
            texts, inside = [type(value).__name__], []
        yield from texts
        waiting += reversed(inside)


def _look(value: Any, followed: dict[int, Any]) -> tuple[list[str], list[Any]]:
    """(what a value says of itself, what is in it)."""
    if isinstance(value, _PLAIN):
        return [f"{type(value).__name__} {value!r}"], []
    title = _title(value)
    if id(value) in followed or _foreign(value):
        return [title], []
    followed[id(value)] = value
    inside = list(_inside(value))
    if not isinstance(value, FunctionType):
        return [title], inside
    return [title, value.__code__.co_code.hex()], [*inside, *_used(value.__code__, value.__globals__)]


def _inside(value: Any) -> Iterable[Any]:  # noqa: PLR0911 - one for each kind
    """What a value of the user's holds."""
    match value:
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
            return value.__defaults__, value.__kwdefaults__, cells, getattr(value, "__wrapped__", None)
        case partial():
            return value.func, value.args, value.keywords
        case MethodType():
            return value.__func__, value.__self__
        case dict():
            return [item for pair in value.items() for item in pair]
        case list() | tuple():
            return value
        case set() | frozenset():
            return sorted(value, key=repr)
        case re.Pattern():
            return value.pattern, value.flags
        case type():
            return [item for name, item in vars(value).items() if not name.startswith("__") or name == "__call__"]
        case staticmethod() | classmethod() | property():
            return (value.fget if isinstance(value, property) else value.__func__,)
        case ModuleType():
            return ()
        case _:
            return type(value), getattr(value, "__dict__", None)


def _used(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Constants, names, and what the global names stand for, of a function and of those inside it."""
    written = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_code
            yield from _used(constant, names)
        else:
            yield constant
    modules = [names[name] for name in code.co_names if isinstance(names.get(name), ModuleType)]
    for name in code.co_names:
        yield name
        if name in names and name not in written:  # what it counts for itself is no part of what it is
            yield names[name]
        yield from (vars(module)[name] for module in modules if name in vars(module) and not _foreign(module))


def _title(value: Any) -> str:
    shown = value if hasattr(value, "__qualname__") else type(value)
    name = value.__name__ if isinstance(value, ModuleType) else getattr(shown, "__qualname__", "")
    return f"{type(value).__name__} {name}"


def _foreign(value: Any) -> bool:
    """Whether it comes from Python itself or an installed package; containers of data never do."""
    if type(value) in _CONTAINERS or isinstance(value, _WRAPPERS):
        return False
    owner = value if isinstance(value, type | FunctionType | ModuleType) else type(value)
    module = owner if isinstance(owner, ModuleType) else sys.modules.get(str(owner.__module__))
    file = getattr(module, "__file__", None)
    if module is None or (file is None and module.__name__ != "__main__"):
        return module is not None  # built in; a module that is gone was the user's
    return file is not None and str(Path(file).resolve()).startswith(_INSTALLED)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
