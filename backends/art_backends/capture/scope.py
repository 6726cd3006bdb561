"""The scope: a ContextVar that says which rollout the running code belongs to, and which node of the agent it is.

A scope is opened with its rollout's secret token and ends with the rollout. Code that outlives it (a thread, a task)
still carries it, but ended: its calls are served by the proxy and belong to no rollout. That is why an ended scope is
kept and marked rather than forgotten: forgetting it would send a straggler's request to the app's own provider.

A framework's callbacks cannot undo what they set: the one that tells a run's end may be called in another context than
the one that told its start (LangChain shields the asynchronous ones in a task of their own). So what a run sets is an
object that is marked when the run is over, and readers step over marked ones.

It refuses to know HTTP, the SDK or any framework: the route and the hooks read and set what is here.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(eq=False)
class NodeContext:
    """Where in the agent's program the running code is. Each field is what the framework said, or None.

    ``requests`` counts the SDK requests made while this was the current node (routed or not); a model call that ends
    with 0 was answered by a cache, or by a client that is not the openai SDK. When ``done``, ``parent`` counts.
    """

    name: str | None = None
    step: int | None = None
    checkpoint_ns: str | None = None
    task_id: str | None = None
    node_run_id: str | None = None
    run_id: str | None = None
    agent: str | None = None
    requests: int = 0
    parent: NodeContext | None = None
    done: bool = False


class Scope:
    """One rollout's claim on the code that runs for it.

    ``base_url`` is the proxy's API root (with or without ``/v1``), ``models`` the model names that are routed (empty:
    all). ``counts`` tells what happened, by name:

    - ``routed``: requests sent to the proxy as this rollout's
    - ``after_end``: requests sent to the proxy after the scope ended (they belong to no rollout)
    - ``other_model``: requests for a model name that is not ours; they went to their provider
    - ``not_captured``: requests of the SDK that are no chat completions, completions, responses or models
    - ``no_request``: model calls of the framework that made no SDK request (a cache, or another provider's client)
    - ``hook_errors``, ``route_errors``: our own trouble; the agent never saw it
    """

    def __init__(self, base_url: str, token: str, rollout_id: str, models: Iterable[str] = ()) -> None:
        root = base_url.rstrip("/")
        self.base_url = root if root.endswith("/v1") else root + "/v1"
        self.token = token
        self.rollout_id = rollout_id
        self.models = frozenset(models)
        self._ended = False
        self._counts: Counter[str] = Counter()
        self._details: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:  # never the token
        return f"Scope(rollout_id={self.rollout_id!r}, base_url={self.base_url!r}, ended={self._ended})"

    @property
    def ended(self) -> bool:
        return self._ended

    def end(self) -> None:
        """End the scope, in every thread and task that carries it. Idempotent."""
        with _REGISTRY.lock:
            self._ended = True
            _REGISTRY.open.discard(self)

    def count(self, name: str, detail: str = "") -> None:
        with self._lock:
            self._counts[name] += 1
            if detail and (len(self._details) < 1000 or (name, detail) in self._details):
                self._details[name, detail] += 1

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    @property
    def details(self) -> dict[str, dict[str, int]]:
        """For counts that have one, by detail: which path, which model, which class."""
        with self._lock:
            told: dict[str, dict[str, int]] = {}
            for (name, detail), number in self._details.items():
                told.setdefault(name, {})[detail] = number
            return told


@dataclass(eq=False)
class Binding:
    """A scope that a framework's run set for its length; when ``done``, ``parent`` (what counted before) counts.

    Code that the run started and that outlives it is then back at ``parent`` as well: it cannot be told from the
    run's caller, who carries the same binding.
    """

    scope: Scope
    parent: Scope | Binding | None
    done: bool = False


@dataclass
class _Registry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: set[Scope] = field(default_factory=set)
    by_rollout: weakref.WeakValueDictionary[str, Scope] = field(default_factory=weakref.WeakValueDictionary)
    outside: int = 0


_REGISTRY = _Registry()

# Set through the functions below only, and read through current_scope and current_node.
SCOPE: ContextVar[Scope | Binding | None] = ContextVar("art_scope", default=None)
NODE: ContextVar[NodeContext | None] = ContextVar("art_node", default=None)


def current_scope() -> Scope | None:
    """The scope that the running code carries: open, ended, or None."""
    found = _standing()
    return found.scope if isinstance(found, Binding) else found


def current_node() -> NodeContext | None:
    """The node that the running code belongs to, as far as a framework has told."""
    node = NODE.get()
    while node is not None and node.done:
        node = node.parent
    return node


def bind_scope(scope: Scope) -> Binding:
    """Let a scope count from here on, until the returned binding is marked ``done``."""
    binding = Binding(scope, _standing())
    SCOPE.set(binding)
    return binding


def bind_node(node: NodeContext) -> None:
    """Let a node count from here on, until it is marked ``done``."""
    node.parent = current_node()
    NODE.set(node)


def _standing() -> Scope | Binding | None:
    found = SCOPE.get()
    while isinstance(found, Binding) and found.done:
        found = found.parent
    return found


def find_scope(rollout_id: str) -> Scope | None:
    """The scope of a rollout while anything still refers to it (ended ones too)."""
    return _REGISTRY.by_rollout.get(rollout_id)


def open_scope(base_url: str, token: str, rollout_id: str, models: Iterable[str] = ()) -> Scope:
    """Open a scope without entering it: for ``batch``, whose inputs name their rollout in their metadata.

    Keep the returned object until the run is over, then call its ``end()``.
    """
    scope = Scope(base_url, token, rollout_id, models)
    with _REGISTRY.lock:
        _REGISTRY.open.add(scope)
        _REGISTRY.by_rollout[rollout_id] = scope
    return scope


@contextmanager
def rollout_scope(base_url: str, token: str, rollout_id: str, models: Iterable[str] = ()) -> Iterator[Scope]:
    """Run a block as one rollout: its model calls, in whatever task or thread, carry the rollout's token.

    On leaving, the scope ends everywhere. Scopes nest; the innermost counts.
    """
    scope = open_scope(base_url, token, rollout_id, models)
    previous, previous_node = SCOPE.get(), NODE.get()
    SCOPE.set(scope)
    NODE.set(None)
    try:
        yield scope
    finally:
        scope.end()
        # Not reset(token): a generator-based caller may leave in another context than it entered.
        if _standing() is scope:
            SCOPE.set(previous)
            NODE.set(previous_node)


def count_outside() -> None:
    """Note an SDK request that carries no scope while a rollout is open: perhaps a call that was lost."""
    if _REGISTRY.open:
        with _REGISTRY.lock:
            _REGISTRY.outside += 1


def outside_requests() -> int:
    """SDK requests made outside every scope while some rollout was open, in this process so far.

    Ordinary where other code (a judge, say) calls models meanwhile; else a sign of calls that lost their context.
    """
    return _REGISTRY.outside
