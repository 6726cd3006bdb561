"""The recorder: a call's intent when the engine is asked, its outcome before the agent may go on.

It keeps the finished calls of live rollouts in memory (bounded; read from the store again after a restart or when a
rollout was dropped), because the next call may continue one of them, and because what makes an earlier call void must
be recognised: an SDK's retry of it, or another run of its node for the same task (a retry policy, a resumed interrupt).

Trouble with the store is never the agent's: it is logged, counted, and marked on the rollout (``capture_lost``),
which then must not train. It refuses to decide what trains beyond ``Call.excluded``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from art_backends.config import Limits
from art_backends.proxy.identity import RolloutContext
from art_backends.proxy.limits import Counters
from art_backends.proxy.outcome import BROKEN
from art_backends.proxy.prefix import RolloutIndex
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Node, Sampling

log = logging.getLogger(__name__)

_CALL = Call(id="")  # to be copied, which takes a tenth of the time that a new one takes
RETRY, RERUN = "retry", "rerun"  # why a call is void: another took its place


class CallStore(Protocol):
    """What the recorder needs of a store."""

    def begin_call(self, call: Call) -> None:
        """Note an intent: it is durable soon, unless the outcome is before."""
        ...

    async def finish_call(self, call: Call) -> None:
        """Write an outcome in place of what is known of this call; may come again with a changed outcome. Returns when
        it is durable, or raises."""
        ...

    async def calls(self, rollout_id: str) -> list[Call]:
        """All calls of a rollout in order of arrival."""
        ...


def digest(body: Mapping[str, Any]) -> bytes:
    """What identifies a request's content, whatever the order of its fields."""
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).digest()


@dataclass(eq=False)
class Recording:
    """A call being recorded."""

    context: RolloutContext
    call: Call
    digest: bytes
    known: bool = True  # the store was told of it; not if its rollout had closed by then
    replaced: str | None = None  # RETRY or RERUN, once such a call has come
    continued: bool = False  # a later call begins with its tokens: the agent got its answer
    voids: list[Recording] = field(default_factory=list)  # calls that it makes void: to be written with its outcome


@dataclass(eq=False)
class _Rollout:
    index: RolloutIndex = field(default_factory=RolloutIndex)
    kept: list[Call] = field(default_factory=list)  # what the index holds
    seen: deque[Recording] = field(default_factory=deque)
    next: int = 0
    active: int = 0
    loaded: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Recorder:
    """See the module. Used in one event loop."""

    def __init__(self, store: CallStore, limits: Limits, counters: Counters) -> None:
        self._store = store
        self._limits = limits
        self._counters = counters
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()

    async def begin(
        self,
        context: RolloutContext,
        *,
        request: Mapping[str, Any],
        model: str,
        node: Node,
        retry: int,
        sampling: Sampling,
    ) -> Recording:
        """Note the intent; never raises for the store's sake. Every begin needs one ``end``."""
        rollout = await self._rollout(context)
        # no await from here on: who is cancelled has begun a call, or has not
        call = _CALL.model_copy(
            update={
                "id": uuid.uuid4().hex,
                "rollout_id": context.id,
                "sequence": rollout.next,
                "model": model,
                "version": context.version,
                "node": node,
                "request": dict(request),
                "prompt_token_ids": [],
                "choices": [],
                "sampling": sampling,
                "retry": retry,
                "started": time.time(),
            }
        )
        rollout.next += 1
        rollout.active += 1
        recording = Recording(context, call, digest(request), known=not context.closed)
        if retry and (replaced := _replaced(rollout, recording)) is not None:
            self._void(recording, replaced, RETRY)
        for earlier in _earlier_runs(rollout, node):
            self._void(recording, earlier, RERUN)
        self._see(rollout, recording)
        if recording.known:
            self._store.begin_call(call)
        return recording

    def refused(self, context: RolloutContext, *, request: Mapping[str, Any], node: Node, retry: int) -> None:
        """Note a request that was refused for lack of a place: a retry of it replaces no call."""
        rollout = self._rollouts.get(context.id)
        if rollout is not None:
            refused = {"rollout_id": context.id, "status": CallStatus.ERROR, "node": node, "retry": retry}
            call = _CALL.model_copy(update=refused)
            self._see(rollout, Recording(context, call, digest(request), known=False))

    def index(self, recording: Recording) -> RolloutIndex:
        """The finished calls of this recording's rollout."""
        return self._rollouts[recording.context.id].index

    def continued(self, recording: Recording, call_id: str) -> None:
        """Note that a recording's prompt begins with the tokens of an earlier call."""
        for other in self._rollouts[recording.context.id].seen:
            if other.call.id == call_id:
                other.continued = True

    async def finish(self, recording: Recording, status: CallStatus, **changes: Any) -> None:
        """Write the outcome, and which calls this one makes void; durable on return, or counted as lost. May be called
        again to correct the status."""
        call = recording.call.model_copy(update={**changes, "status": status, "finished": time.time()})
        excluded = _excluded(recording, call)
        if excluded != call.excluded:
            call = call.model_copy(update={"excluded": excluded})
        recording.call = call
        while recording.voids:
            await self._write(recording.voids.pop())
        if call.status is CallStatus.OK and call.capture is CaptureLevel.TOKENS and recording.replaced is None:
            self._keep(self._rollouts[recording.context.id], call)
        await self._write(recording)

    def end(self, recording: Recording) -> None:
        """The call is over, whatever came of it."""
        rollout = self._rollouts.get(recording.context.id)
        if rollout is not None:
            rollout.active -= 1
            if recording.context.closed and not rollout.active:
                del self._rollouts[recording.context.id]

    def forget(self, rollout_id: str) -> None:
        """Drop what is kept in memory of a rollout that has closed; calls in flight still finish."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is not None and not rollout.active:
            del self._rollouts[rollout_id]

    def lost(self, recording: Recording, what: str, error: BaseException) -> None:
        """Count a call whose answer could not be read for the record."""
        self._lost(recording.context, what, error)

    async def _rollout(self, context: RolloutContext) -> _Rollout:
        rollout = self._rollouts.get(context.id)
        if rollout is None:
            rollout = self._rollouts[context.id] = _Rollout()
            self._evict()
        else:
            self._rollouts.move_to_end(context.id)
        if not rollout.loaded:
            rollout.active += 1  # must not be dropped meanwhile
            try:
                async with rollout.lock:
                    if not rollout.loaded:
                        await self._load(rollout, context)
            finally:
                rollout.active -= 1
        return rollout

    async def _load(self, rollout: _Rollout, context: RolloutContext) -> None:
        try:
            calls = await self._store.calls(context.id)
        except Exception as error:  # noqa: BLE001 - boundary: the agent is served whatever happens to the store
            self._lost(context, "earlier calls", error)
            calls = []
        for call in calls:
            rollout.next = max(rollout.next, call.sequence + 1)
            replaced = call.excluded if call.excluded in (RETRY, RERUN) else None
            self._see(rollout, Recording(context, call, digest(call.request), replaced=replaced))
            if call.status is CallStatus.OK and call.capture is CaptureLevel.TOKENS and replaced is None:
                self._keep(rollout, call)
        rollout.loaded = True

    def _evict(self) -> None:
        surplus = len(self._rollouts) - self._limits.rollouts
        if surplus <= 0:
            return
        newest = next(reversed(self._rollouts))
        idle = [key for key, value in self._rollouts.items() if not value.active and key != newest]
        for key in idle[:surplus]:
            del self._rollouts[key]

    def _see(self, rollout: _Rollout, recording: Recording) -> None:
        rollout.seen.append(recording)
        while len(rollout.seen) > self._limits.calls_per_rollout:
            rollout.seen.popleft()

    def _keep(self, rollout: _Rollout, call: Call) -> None:
        rollout.kept.append(call)
        if len(rollout.kept) <= self._limits.calls_per_rollout:
            rollout.index.add(call)
            return
        rollout.kept = rollout.kept[len(rollout.kept) // 2 :]
        rollout.index = RolloutIndex()
        for known in rollout.kept:
            rollout.index.add(known)

    def _void(self, recording: Recording, earlier: Recording, why: str) -> None:
        earlier.replaced = why
        if earlier.call.status in (CallStatus.OK, CallStatus.OPEN):
            if why == RETRY:
                self._counters.retries += 1
            else:
                self._counters.reruns += 1
        if earlier.call.status is CallStatus.OK:
            earlier.call = earlier.call.model_copy(update={"excluded": why})
            recording.voids.append(earlier)

    async def _write(self, recording: Recording) -> None:
        if not recording.known:
            return
        try:
            await self._store.finish_call(recording.call)
            self._counters.captured += 1
        except Exception as error:  # noqa: BLE001 - boundary: the agent is served whatever happens to the store
            self._lost(recording.context, "outcome", error)

    def _lost(self, context: RolloutContext, what: str, error: BaseException) -> None:
        context.capture_lost += 1
        self._counters.capture_lost += 1
        log.error("rollout %s: %s of a call not recorded (%s): %s", context.id, what, type(error).__name__, error)


def _excluded(recording: Recording, call: Call) -> str | None:
    """The first reason that applies."""
    if call.status in (CallStatus.CANCELLED, CallStatus.ERROR):
        return call.status.value
    if recording.replaced is not None:
        return recording.replaced
    if recording.context.closed:
        return "rollout_closed"
    if call.sampling.constrained:
        return "constrained"
    if any(choice.finish_reason in BROKEN for choice in call.choices):
        return "abort"
    return call.excluded


def _earlier_runs(rollout: _Rollout, node: Node) -> list[Recording]:
    """Calls of earlier runs of this node for the same task: what they led to was thrown away."""
    if node.node_run_id is None or node.task_id is None:
        return []
    return [
        earlier
        for earlier in rollout.seen
        if earlier.call.node.task_id == node.task_id
        and earlier.call.node.checkpoint_ns == node.checkpoint_ns
        and earlier.call.node.node_run_id not in (None, node.node_run_id)
        and earlier.replaced is None
    ]


def _replaced(rollout: _Rollout, retry: Recording) -> Recording | None:
    """The call that a retry repeats: same content, fewer retries. One that failed is likelier than one in flight,
    that likelier than one that was answered; one whose answer the agent used is none."""
    run_id = retry.call.node.run_id
    candidates = [
        earlier
        for earlier in rollout.seen
        if earlier.digest == retry.digest
        and earlier.call.retry < retry.call.retry
        and earlier.replaced is None
        and not earlier.continued
        and (run_id is None or earlier.call.node.run_id in (None, run_id))
    ]
    order = {CallStatus.ERROR: 2, CallStatus.CANCELLED: 2, CallStatus.OPEN: 1, CallStatus.OK: 0}
    # of equals the latest: max keeps the first, so look from the end
    return max(reversed(candidates), key=lambda item: (order[item.call.status], item.call.retry), default=None)
