"""What an object holds that may lead to a model: attributes, elements, closures, globals that a function names.

It refuses to call anything, and to look into what libraries keep for themselves.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_ITEMS = 1_000  # elements of one container
# Modules whose functions' globals say nothing about the app.
_LIBRARIES = frozenset({"langchain", "langgraph", "openai", "anthropic", "google", "ollama", "pydantic", "httpx"})
# Of these, objects that are built to hold others.
_HOLDERS = frozenset({"langchain", "langchain_core", "langchain_classic", "langgraph", "functools", "types"})

_LAZY_CLIENTS = "openai._module_client"  # behind openai.chat and its like
_OF_MODELS = frozenset({"ChatProxy", "CompletionsProxy", "ResponsesProxy"})

PLAIN = (str, bytes, int, float, complex, bool, type(None), types.CodeType, types.ModuleType, types.BuiltinFunctionType)


def within(value: Any) -> Iterator[Any]:
    """What a value holds that may lead to a model."""
    if isinstance(value, Mapping):
        yield from list(value.values())[:_ITEMS]
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)[:_ITEMS]
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif not isinstance(value, (type, *PLAIN)) and _may_hold(type(value)):
        yield from _attributes(value)


def _of_function(function: Callable[..., Any]) -> Iterator[Any]:
    assert isinstance(function, types.FunctionType)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)
    if not is_library(function.__module__):
        yield from _named(function)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Globals that a function names, and what it may take from the modules among them: of libraries', classes and
    methods of objects that the module holds."""
    names = list(dict.fromkeys(_names(function.__code__)))
    places = [(function.__globals__, False)]
    # What it imports when it runs, as far as that is loaded already.
    loaded = (sys.modules.get(name) for name in _imports(function))
    places += [(vars(module), is_library(module.__name__)) for module in loaded if module is not None]
    seen = set[int]()
    while places:
        place, library = places.pop()
        for value in (place[name] for name in names if name in place):
            if type(value).__module__ == _LAZY_CLIENTS:  # makes a client when it is asked for anything, its class too
                if type(value).__name__ in _OF_MODELS:
                    yield sys.modules["openai"].OpenAI
                continue
            if library and not isinstance(value, type | types.MethodType):
                continue
            yield value
            if isinstance(value, types.ModuleType) and id(value) not in seen:
                seen.add(id(value))
                places.append((vars(value), is_library(value.__name__)))


def imports_late(function: types.FunctionType) -> bool:
    """Whether a function of the app imports something when it runs that may hold graphs or models."""
    return not is_library(function.__module__) and any(map(_may_hold_graphs, _imports(function)))


def imports_models_late(function: types.FunctionType) -> bool:
    """Whether a function of the app imports a library that has models when it runs."""
    return not is_library(function.__module__) and any(map(_is_of_models, _imports(function)))


def names_model(function: types.FunctionType) -> bool:
    """Whether a function of the app calls something with an argument ``model=``: which, cannot be known."""
    constants = (constant for code in _codes(function.__code__) for constant in code.co_consts)
    named = (constant for constant in constants if isinstance(constant, tuple))  # names of keyword arguments
    return not is_library(function.__module__) and any("model" in names for names in named)


def _imports(function: types.FunctionType) -> Iterator[str]:
    """Names of modules that a function imports when it runs; relative ones without what they are relative to."""
    for code in _codes(function.__code__):
        yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")


def _may_hold_graphs(module: str) -> bool:
    root = module.partition(".")[0]
    known = root in sys.stdlib_module_names or _is_of_models(module)
    return not known or root in ("importlib", "langchain") or root.startswith("langgraph")


def _is_of_models(module: str) -> bool:
    return is_library(module) and module.partition(".")[0] not in sys.stdlib_module_names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    for inner in _codes(code):
        yield from inner.co_names


def is_library(module: str | None) -> bool:
    """Whether a module is Python's or of a library whose insides say nothing about the app."""
    root = (module or "").partition(".")[0]
    return root in sys.stdlib_module_names or root in _LIBRARIES or root.startswith(("langchain_", "langgraph_"))


def _may_hold(cls: type) -> bool:
    """Objects of the app's classes, and of LangChain's that are built to hold others."""
    return cls.__module__.partition(".")[0] in _HOLDERS or not is_library(cls.__module__)


def _attributes(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    held = _stored(value, "__dict__")
    if isinstance(held, Mapping):
        yield from list(held.values())[:_ITEMS]
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) or ()]
    for name in slots:
        if isinstance(name, str) and (not name.startswith("__") or name == "__pydantic_private__"):
            yield _stored(value, name)
    for kind in type(value).__mro__:
        if _is_apps(kind.__module__):
            yield from _methods(kind)


def _methods(cls: type) -> Iterator[Any]:
    """Functions of a class that code of the app may call on its objects."""
    for name, value in vars(cls).items():
        if name == "__call__" or not name.startswith("__"):
            function = getattr(value, "__func__", value)  # of a static method, or one of the class
            if isinstance(function, types.FunctionType):
                yield function


def _is_apps(module: str | None) -> bool:
    """Whether a module is the app's: none of Python's, and not installed as a package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return not is_library(module) and file is not None and not {"site-packages", "dist-packages"} & {*Path(file).parts}


def _stored(value: Any, name: str) -> Any:
    """An attribute that is there; its class's own ``__getattr__``, which may do anything, is not asked."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None
