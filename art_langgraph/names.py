"""Names of models and nodes that the user gave, held against those that the graph has.

A slip of the pen in ``models`` would send every call to its provider, one in ``nodes`` would leave nothing to train;
both show only when a run has begun. A name that the graph cannot have is an error; where the graph may hold more than
could be looked at, it is a warning. It refuses to correct a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from art_backends.errors import ConfigError, did_you_mean

from art_langgraph.inspection import Inspection, inspect_graph, warnings_of

_SHOWN = 20  # names


def check_names(found: Inspection, models: Iterable[str], nodes: Iterable[str]) -> list[str]:
    """Warnings about given names. ConfigError if one is none of the graph's, whatever happens when it runs.

    ``found`` is an inspection with these names.
    """
    told = [*_models(found, sorted(models)), *_nodes(found, nodes := sorted(nodes))]
    reached = [model for model in found.models if model.route != "provider"]
    if nodes and reached and not any(model.trained for model in reached):
        places = ", ".join(dict.fromkeys(model.node for model in reached))
        others = [model.name for model in found.models if model.trained and model.by_name]
        why = f", and models does not name {', '.join(dict.fromkeys(others))}" if others else ""
        told.append(
            f"nodes: no model of the policy was found in {', '.join(nodes)}, only in {places}{why}: perhaps nothing "
            "would train"
        )
    return told


def before_a_run(graph: Any, models: Collection[str], nodes: Collection[str]) -> list[str]:
    """What to tell the user before the graph runs: what cannot be captured, what is switched off, doubtful names.

    ConfigError for a name that the graph cannot have.
    """
    found = inspect_graph(graph, models, nodes)
    return [*warnings_of(found), *check_names(found, models, nodes)]


def _models(found: Inspection, names: list[str]) -> list[str]:
    known = dict.fromkeys(model.name for model in found.models)
    wrong = [name for name in names if name not in known]
    if not wrong or not found.models:
        return []
    named = [name for name in known if name != "?"]
    said = f"models: no model of the graph was found by the name {_wrong(wrong, named, named)}"
    if found.sure_of_models:
        raise ConfigError(said)
    return [f"{said}; models that are made while the graph runs may have others"]


def _nodes(found: Inspection, names: list[str]) -> list[str]:
    paths = [path.split("/") for path in found.nodes]
    known = {"/".join(path[start:end]) for path in paths for end in range(1, len(path) + 1) for start in range(end)}
    known |= set(found.agents)
    listed = dict.fromkeys([*found.nodes, *found.agents])
    wrong = [name for name in names if name not in known]
    if not wrong or not known:
        return []
    said = f"nodes: no node or agent of the graph was found by the name {_wrong(wrong, known, listed)}"
    if found.sure:
        raise ConfigError(said)
    return [f"{said}; nodes that are made while the graph runs may have others"]


def _wrong(names: list[str], known: Collection[str], listed: Collection[str]) -> str:
    """The names, those that are similar, and those that there are."""
    hint = did_you_mean(names, known)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    there = f"{' There' if hint else '; there'} are: {', '.join([*listed][:_SHOWN])}{more}" if listed else ""
    return f"{', '.join(names)}{hint}{there}"
