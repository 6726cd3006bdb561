"""Find the user's graph: an object, ``module:attr``, ``path.py:attr``, a factory, or an entry of ``langgraph.json``.

A factory may be a function, sync or async, with or without a config argument, or a context manager (for checkpointers
that must be opened and closed). It is called once; its graph serves all rollouts.

It refuses to hide the app's own errors: what the app raises while it is imported or built is shown with its own
traceback. It refuses to import an app twice, or to edit it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from art_backends.errors import GraphError
from art_backends.functions import own_traceback
from langchain_core.language_models import BaseLanguageModel
from langchain_core.tools import BaseTool
from langgraph.graph import StateGraph
from langgraph.pregel.protocol import PregelProtocol

LANGGRAPH_JSON = "langgraph.json"


class LoadedGraph:
    """A graph ready to run, or a factory that makes one when it is opened.

    ``async with load_graph(…) as loaded: await loaded.ainvoke(input, config)``. A factory that is a context manager is
    closed on leaving, in the task that opened it. For anything else, ``ainvoke`` alone will do.
    """

    def __init__(self, name: str, source: Any) -> None:
        self.name = name
        self._source = source
        self._graph: Any = _as_graph(source)
        self._exit: contextlib.AsyncExitStack | None = None
        self._opening = asyncio.Lock()

    @property
    def graph(self) -> Any:
        """The graph itself; GraphError if a factory has not been opened yet."""
        if self._graph is None:
            raise GraphError(f"{self.name} is a factory that has not been opened: use 'async with load_graph(…)'.")
        return self._graph

    async def open(self) -> LoadedGraph:
        """Make the graph, if it comes from a factory; once."""
        if self._graph is not None:
            return self
        async with self._opening:
            if self._graph is None:
                self._graph = await self._make()
        return self

    async def aclose(self) -> None:
        """Close what the factory opened."""
        if self._exit is not None:
            stack, self._exit, self._graph = self._exit, None, None
            await stack.aclose()

    async def ainvoke(self, value: Any, config: Mapping[str, Any] | None = None) -> Any:
        """The graph's final state, as the graph returns it."""
        await self.open()
        return await self.graph.ainvoke(value, dict(config or {}))

    async def __aenter__(self) -> LoadedGraph:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _make(self) -> Any:
        stack = contextlib.AsyncExitStack()
        try:
            made = _call(self._source, self.name)
            if inspect.isawaitable(made):
                made = await made
            if _as_graph(made) is None and hasattr(made, "__aenter__"):
                made = await stack.enter_async_context(made)
            elif _as_graph(made) is None and hasattr(made, "__enter__"):
                made = stack.enter_context(made)
        except GraphError:
            raise
        except (Exception, SystemExit) as error:  # boundary: the app's code, told with its own traceback
            raise _own_error(f"The factory {self.name} failed", error) from error
        graph = _as_graph(made)
        if graph is None:
            await stack.aclose()
            what = f"returned {_kind(made)}, which is not a graph (no ainvoke method)."
            raise GraphError(f"The factory {self.name} {what}{_hint(made)}")
        self._exit = stack
        return graph


def load_graph(spec: Any) -> LoadedGraph:
    """Load a graph from a spec; GraphError says what was found instead.

    ``spec``: ``"module:attr"``, ``"path.py:attr"``, either without ``:attr`` if there is only one graph in it,
    ``"langgraph.json"`` or ``"langgraph.json:name"``, or the graph or factory itself.
    """
    if isinstance(spec, (str, os.PathLike)):
        return _load_text(os.fspath(spec))
    name = getattr(spec, "name", None) or getattr(spec, "__name__", None) or type(spec).__name__
    loaded = LoadedGraph(str(name), spec)
    _check(loaded.name, spec, None)
    return loaded


def _load_text(spec: str) -> LoadedGraph:
    place, separator, attribute = spec.rpartition(":")
    if not separator:
        place, attribute = spec, ""
    if Path(place).name == LANGGRAPH_JSON:
        return _from_langgraph_json(Path(place), attribute)
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    if not attribute:
        found = graphs_of(module)
        if len(found) != 1:
            raise GraphError(f"{spec} has {_listed(found)}. Name one: {place}:NAME.")
        attribute = found[0]
    try:
        value: Any = module
        for part in attribute.split("."):
            value = getattr(value, part)
    except AttributeError:
        raise GraphError(f"{place} has no attribute {attribute!r}; it has {_listed(graphs_of(module))}.") from None
    _check(spec, value, module)
    return LoadedGraph(spec, value)


def _check(name: str, value: Any, module: ModuleType | None) -> None:
    """GraphError if the value is neither a graph nor a factory of one."""
    if _as_graph(value) is not None or (callable(value) and not hasattr(value, "invoke")):
        return
    if hint := _hint(value):
        raise GraphError(f"{name} is {_kind(value)}, not a graph.{hint}")
    elsewhere = "" if module is None else f" {module.__name__} has {_listed(graphs_of(module))}."
    raise GraphError(f"{name} is {_kind(value)}, not a graph, nor a function that makes one.{elsewhere}")


def graphs_of(module: ModuleType) -> list[str]:
    """Names of a module's graphs (compiled or not)."""
    return sorted(name for name, value in vars(module).items() if not name.startswith("_") and _looks_like_graph(value))


def _looks_like_graph(value: Any) -> bool:
    # By class: a configurable model makes a client when it is asked for an attribute that it does not have.
    return isinstance(value, (StateGraph, PregelProtocol))


def _listed(names: list[str]) -> str:
    if not names:
        return "no graph"
    return f"the graph {names[0]}" if len(names) == 1 else f"these graphs: {', '.join(names)}"


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _hint(value: Any) -> str:
    """What to do about a value that is nearly right."""
    if inspect.iscoroutine(value):
        return " Give the function itself, not what it returns when it is called."
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        kind = "asynccontextmanager" if inspect.isasyncgen(value) else "contextmanager"
        return f" A function that yields its graph needs @contextlib.{kind}."
    return ""


def _as_graph(value: Any) -> Any | None:
    """The value if it is a graph (a model or tool is none); compiled if need be, as LangGraph's server does."""
    if isinstance(value, (type, BaseLanguageModel, BaseTool)):
        return None
    if isinstance(value, StateGraph):
        try:
            return value.compile()
        except Exception as error:  # boundary: the app's graph, told with its own words
            raise _own_error("The graph could not be compiled", error) from error
    return value if callable(getattr(value, "ainvoke", None)) else None


def _call(factory: Any, name: str) -> Any:
    """Call a factory: with no argument, or with an empty config if it wants one."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    needed = [
        item.name
        for item in parameters
        if item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
    if len(needed) > 1:
        raise GraphError(
            f"The factory {name} needs {len(needed)} arguments ({', '.join(needed)}); it may take none, or the config."
        )
    keyword_only = [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]
    config: dict[str, Any] = {"configurable": {}}
    if not needed:
        return factory()
    return factory(**{needed[0]: config}) if needed[0] in keyword_only else factory(config)


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; a command's own folder is not the app's
    if name.replace(".", "").isidentifier() is False:
        raise GraphError(f"{name!r} is neither a module's name nor a .py file. Give module:attr or path.py:attr.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise _own_error(f"{name} could not be imported", error) from error
        raise GraphError(
            f"There is no module {error.name!r} in {here} nor among the installed packages. "
            "Give module:attr or path.py:attr, and start in the app's folder."
        ) from None
    except (Exception, SystemExit) as error:  # boundary: the app's code, told with its own traceback
        raise _own_error(f"{name} could not be imported", error) from error


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise GraphError(f"There is no file {path}.")
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():  # part of a package: its relative imports must work
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))  # as `python path.py` does
    name = ".".join(parts)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) not in (None, str(path)):
        name = f"{name}_{abs(hash(str(path))):x}"  # another app.py was here before
    elif known is not None:
        return known
    elif len(parts) > 1:
        return _import_module(name)
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise GraphError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # boundary: the app's code, told with its own traceback
        sys.modules.pop(name, None)
        raise _own_error(f"{path} could not be imported", error) from error
    return module


def _own_error(what: str, error: BaseException) -> GraphError:
    return GraphError(f"{what}:\n\n{own_traceback(error, Path(__file__).parent)}")


def _from_langgraph_json(path: Path, name: str) -> LoadedGraph:
    """The graph of a LangGraph project file, with its ``dependencies`` importable and its ``env`` set."""
    try:
        project = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GraphError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise GraphError(f"{path} is not JSON: {error}.") from None
    entries = project.get("graphs") if isinstance(project, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise GraphError(f"{path} names no graphs.")
    if not name and len(entries) == 1:
        name = next(iter(entries))
    if name not in entries:
        raise GraphError(f"{path} has these graphs: {', '.join(entries)}. Name one: {path}:NAME.")
    folder = path.resolve().parent
    dependencies = project.get("dependencies") or ()
    if not isinstance(dependencies, (list, tuple)):
        raise GraphError(f"{path}: dependencies must be a list, not {_kind(dependencies)}.")
    for dependency in dependencies:
        if str(dependency).startswith(".") and str(folder / dependency) not in sys.path:
            sys.path.insert(0, str((folder / dependency).resolve()))
    for key, value in _environment(folder, project.get("env")).items():
        os.environ.setdefault(key, value)
    entry = entries[name]
    target = str(entry.get("path", "") if isinstance(entry, dict) else entry)
    place, _, attribute = target.rpartition(":")
    if not place:
        raise GraphError(f"{path}: the graph {name} is {target!r}, not FILE:NAME.")
    return _load_text(f"{folder / place}:{attribute}" if place.endswith(".py") else target)


def _environment(folder: Path, env: Any) -> dict[str, str]:
    if isinstance(env, dict):
        return {str(key): str(value) for key, value in env.items()}
    if not isinstance(env, str) or not (folder / env).is_file():
        return {}
    found = {}
    for line in (folder / env).read_text(encoding="utf-8").splitlines():
        key, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and not key.startswith("#"):
            found[key.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    """A value of an env file, without quotes or the comment behind it."""
    if value[:1] in ("'", '"') and (end := value.find(value[0], 1)) > 0:
        return value[1:end]
    return "" if value.startswith("#") else value.partition(" #")[0].rstrip()
