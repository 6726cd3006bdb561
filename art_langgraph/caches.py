"""Caches that would answer in the policy's place: off while rollouts run, and said aloud.

A node cache skips the model call, an LLM cache its request; what they give is no sample of the policy, and in an
evaluation it would be the answer of an older version. It refuses to touch the user's objects: node caches are off by
the configuration of a run, LangChain's global LLM cache is set aside and comes back. A cache that a model holds itself
cannot be switched off from outside: it is named, and its answers are counted (``no_request``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache, set_llm_cache

# LangGraph's word for "the cache of this run": where it is given, caches of the graph and its subgraphs do not count.
NODES_OFF: Mapping[str, Any] = {"__pregel_cache": None}


@contextmanager
def llm_cache_off() -> Iterator[str | None]:
    """No LLM cache for the length of a block; yields what to tell the user if there was one."""
    cache = get_llm_cache()
    if cache is not None:
        set_llm_cache(None)
    try:
        yield None if cache is None else f"LangChain's LLM cache ({type(cache).__name__}) is off while rollouts run"
    finally:
        if cache is not None and get_llm_cache() is None:
            set_llm_cache(cache)


def of_graph(graph: Any, path: str) -> str | None:
    """What to tell the user of a graph's node cache, if it has one and a node that uses it."""
    cached = sorted(name for name, node in getattr(graph, "nodes", {}).items() if getattr(node, "cache_policy", None))
    if getattr(graph, "cache", None) is None or not cached:
        return None
    where = f"of {path} " if path else ""
    return f"the node cache {where}({type(graph.cache).__name__}, on {', '.join(cached)}) is off while rollouts run"


def of_task(task: Any, name: str, graphs: Iterable[Any]) -> str | None:
    """What to tell the user of a task's cache, if it asks for one and a graph around it has one."""
    found = [graph.cache for graph in graphs if getattr(graph, "cache", None) is not None]
    if not found or not getattr(task, "cache_policy", None):
        return None
    return f"the cache of the task {name} ({type(found[0]).__name__}) is off while rollouts run"


def of_model(model: Any, node: str) -> str | None:
    """What to tell the user of a model's own cache."""
    cache = getattr(model, "cache", None)
    if not isinstance(cache, BaseCache):
        return None
    return (
        f"{type(model).__name__} in {node} has a cache of its own ({type(cache).__name__}): what it answers is no "
        "sample of the policy and does not train; make the model without it"
    )
