"""A LangChain callback that says which rollout, node and run a model call belongs to.

Registered once for the process, it reaches graphs and models that were built long before, and needs nothing of the
app. It sets ContextVars of ``art_backends.capture`` in the very context in which the model call is then made:

- the node (``langgraph_node``, step, checkpoint namespace, task, and which run of the node for that task it is) when
  its run starts, LangChain's run id when a chat model starts; when that run ends, what was there before counts again;
- the scope, where a run's metadata names its rollout (``{"metadata": {"art_rollout": id}}``): that tells the inputs
  of one ``batch`` apart, and repairs contexts that lost the scope on the way.

A model call that ends without a request of the openai SDK (an LLM cache, or a model that ``providers`` does not know)
is counted as ``no_request`` with the model's class.

It refuses to raise into the agent: its own trouble is counted as ``hook_errors``. It sees no tokens and changes no
message.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from uuid import UUID

from art_backends.capture.scope import (
    Binding,
    NodeContext,
    bind_node,
    bind_scope,
    current_node,
    current_scope,
    find_scope,
)
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from art_langgraph import providers

ROLLOUT_KEY = "art_rollout"  # metadata key that names a run's rollout
_MOST_RUNS = 100_000  # runs whose end never comes (an abandoned stream) must not pile up

_Method = TypeVar("_Method", bound=Callable[..., None])


@dataclass
class _Run:
    """What a run set."""

    binding: Binding | None
    node: NodeContext | None
    model: str = ""  # class of the chat model, for runs of one


def _guarded(method: _Method) -> _Method:
    @functools.wraps(method)
    def guarded(self: CaptureHook, *args: Any, **kwargs: Any) -> None:
        if not self.enabled:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # boundary: a callback of ours never disturbs the agent  # noqa: BLE001
            self.errors += 1
            scope = current_scope()
            if scope is not None:
                scope.count("hook_errors", f"{type(error).__name__}: {error}")

    return cast(_Method, guarded)


class CaptureHook(BaseCallbackHandler):
    """The one callback handler of this process; see the module's text."""

    run_inline = True  # in the model call's own task, before it: only so its ContextVars reach the request
    raise_error = False

    def __init__(self) -> None:
        self.enabled = True
        self.errors = 0  # troubles of our own, in rollouts and outside
        self._runs: dict[UUID, _Run] = {}
        self._lock = threading.Lock()

    @_guarded
    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._enter(run_id, metadata, node_run=_is_node_run(tags, metadata, name))

    @_guarded
    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._enter(run_id, metadata)

    @_guarded
    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[Any]],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._enter_model(serialized, run_id, metadata, kwargs)

    @_guarded
    def on_llm_start(
        self,
        serialized: dict[str, Any] | None,
        prompts: list[str],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._enter_model(serialized, run_id, metadata, kwargs)

    @_guarded
    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        scope = current_scope()
        run = self._leave(run_id)
        if run is not None and run.model and run.node is not None and not run.node.requests and scope is not None:
            scope.count("no_request", run.model)

    @_guarded
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._leave(run_id)

    @_guarded
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._leave(run_id)

    @_guarded
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._leave(run_id)

    @_guarded
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._leave(run_id)

    @_guarded
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._leave(run_id)

    def _enter_model(
        self, serialized: dict[str, Any] | None, run_id: UUID, metadata: dict[str, Any] | None, told: dict[str, Any]
    ) -> None:
        # One generate() of several prompts starts all its runs before the first request: then nobody can say which
        # request is whose, and none gets a run id.
        alone = int(told.get("batch_size") or 1) <= 1
        providers.refresh()  # a class that the app has imported only now
        name = told.get("name") or ((serialized or {}).get("id") or ["?"])[-1]
        self._enter(run_id, metadata, model=str(name) if alone else "", model_run=alone)

    def _enter(
        self,
        run_id: UUID,
        metadata: dict[str, Any] | None,
        *,
        model: str = "",
        model_run: bool = False,
        node_run: bool = False,
    ) -> None:
        metadata = metadata or {}
        scope, node = current_scope(), current_node()
        named = find_scope(metadata[ROLLOUT_KEY]) if ROLLOUT_KEY in metadata else None
        if named is not None and named is not scope and not (named.ended and scope is not None and not scope.ended):
            scope = named  # (but a rollout that is over must not claim the code of one that runs)
        else:
            named = None
        if scope is None:
            return  # no rollout's code: nothing of ours to say
        told = _node(metadata, run_id if model_run else None)
        if told is not None and node is not None and _same(told, node):
            told.node_run_id = node.node_run_id
            if not model_run:
                told = None
        elif told is not None and node_run:
            told.node_run_id = str(run_id)
        if named is None and told is None:
            return
        binding = None if named is None else bind_scope(named)
        if told is not None:
            bind_node(told)
        with self._lock:
            while len(self._runs) >= _MOST_RUNS:
                self._runs.pop(next(iter(self._runs)))
            self._runs[run_id] = _Run(binding, told, model)

    def _leave(self, run_id: UUID) -> _Run | None:
        with self._lock:
            run = self._runs.pop(run_id, None)
        if run is not None and run.node is not None:
            run.node.done = True
        if run is not None and run.binding is not None:
            run.binding.done = True
        return run


def _node(metadata: dict[str, Any], run_id: UUID | None) -> NodeContext | None:
    """The node that a run's metadata tells, or None if it tells none and the run is no model's."""
    name = metadata.get("langgraph_node")
    if name is None and run_id is None:
        return None
    namespace = metadata.get("langgraph_checkpoint_ns") or metadata.get("checkpoint_ns")
    return NodeContext(
        name=name,
        step=metadata.get("langgraph_step"),
        checkpoint_ns=namespace,
        task_id=task_of(namespace),
        run_id=None if run_id is None else str(run_id),
        agent=metadata.get("lc_agent_name"),
    )


def _is_node_run(tags: list[str] | None, metadata: dict[str, Any] | None, name: str | None) -> bool:
    """Whether a run is that of a node (or a ``@task``) itself, not of something within it."""
    node = (metadata or {}).get("langgraph_node")
    if node is None:
        return False
    return any(tag.startswith("graph:step:") for tag in tags or ()) or name == node


def _same(one: NodeContext, other: NodeContext) -> bool:
    return (one.name, one.step, one.checkpoint_ns) == (other.name, other.step, other.checkpoint_ns)


def task_of(namespace: str | None) -> str | None:
    """LangGraph's id of the innermost task in a checkpoint namespace.

    >>> task_of("outer:3b7|inner:9f2")
    '9f2'
    """
    for part in reversed((namespace or "").split("|")):
        _, separator, task = part.partition(":")
        if separator:
            return task
    return None


HOOK = CaptureHook()
HOOK.enabled = False
# The default makes it visible in every thread and context. LangChain has no way to take a hook back, so this one is
# registered for as long as the process lives, with a variable that can be seen as empty.
_VARIABLE: ContextVar[BaseCallbackHandler | None] = ContextVar("art_capture_hook", default=HOOK)
_registered: list[bool] = []
_users: list[None] = []
_lock = threading.Lock()


def install() -> None:
    """Let every LangChain run of this process tell its node; pairs with ``uninstall()``."""
    with _lock:
        if not _registered:
            register_configure_hook(_VARIABLE, inheritable=True)
            _registered.append(True)
        _users.append(None)
        HOOK.enabled = True


def uninstall() -> None:
    """Undo one ``install()``; after the last one the hook says nothing any more."""
    with _lock:
        if _users:
            _users.pop()
        HOOK.enabled = bool(_users)
