"""The control API's routes: status, settings, rollouts, steps, forgetting. The guard lets only the admin's token
through to them.

Bodies are validated (unknown fields are errors), filters are a fixed list, errors have a stable ``code``. It refuses
bodies beyond ``BODY_BYTES`` and waits no longer than ``MAX_WAIT``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from art_backends.config import TrainConfig
from art_backends.errors import (
    AdapterError,
    ArtError,
    ConfigError,
    EngineError,
    ScenarioError,
    ServerError,
    StoreError,
)
from art_backends.proxy.engine import Engine
from art_backends.server.auth import CONTROL, error
from art_backends.server.folder import PolicyFile
from art_backends.server.policy import PolicyTable
from art_backends.server.retention import Retention
from art_backends.server.sessions import Sessions
from art_backends.server.steps import Steps
from art_backends.store import AsyncStore, ConflictError, NotFoundError
from art_backends.trajectories import Purpose, Rollout, RolloutError

log = logging.getLogger(__name__)

BODY_BYTES = 64 * 1024 * 1024
BODY_SECONDS = 60.0
MAX_WAIT = 60.0  # seconds a poll is held
ENGINE_SECONDS = 2.0  # for the engine's own figures on the status page

Handler = Callable[[Request], Awaitable[Response]]
M = TypeVar("M", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Register(_Body):
    config: TrainConfig


class _Open(_Body):
    policy: str
    purpose: Purpose = Purpose.TRAIN
    scenario_id: str = Field("", max_length=1000)
    scenario: Any = None
    step: int | None = Field(None, ge=0, lt=2**31)
    group: str = Field("", max_length=1000)
    sample: int = Field(0, ge=0, lt=2**31)
    version: int | None = Field(None, ge=0, lt=2**31)


class _Close(_Body):
    output: Any = None
    reward: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    scored_by: str | None = None
    error: RolloutError | None = None
    fault: str | None = None


class _Step(_Body):
    policy: str
    step: int = Field(ge=1, lt=2**31)
    rollout_ids: list[str] | None = None
    examples: list[dict[str, Any]] | None = None  # each with messages and perhaps tools: imitated
    config: TrainConfig


class _Forget(_Body):
    subject: str = Field(min_length=1, max_length=1000)


class _Filters(_Body):
    policy: str | None = None
    step: int | None = Field(None, lt=2**31)
    purpose: Purpose | None = None
    closed: bool | None = None
    group: str | None = None
    limit: int = Field(1000, ge=1, le=10_000)
    after: str | None = None
    prefix: str | None = Field(None, min_length=1)
    newest: bool = False


class _StepQuery(_Body):
    policy: str
    wait: float = Field(0.0, ge=0)


class _PolicyQuery(_Body):
    policy: str


@dataclass
class Services:
    """What the routes work on."""

    store: AsyncStore
    policies: PolicyTable
    sessions: Sessions
    steps: Steps
    retention: Retention
    engine: Engine
    children: Sequence[Any]  # each with state()
    policy_file: PolicyFile
    counters: Callable[[], dict[str, Any]]  # of the proxy
    url: str = ""
    started: float = 0.0


class Control:
    """The handlers; ``routes()`` for the app."""

    def __init__(self, services: Services) -> None:
        self._s = services

    def routes(self) -> list[BaseRoute]:
        table: list[tuple[str, Handler, Literal["GET", "POST"]]] = [
            ("status", self._status, "GET"),
            ("policies", self._register, "POST"),
            ("rollouts", self._open, "POST"),
            ("rollouts", self._list, "GET"),
            ("rollouts/{id}", self._show, "GET"),
            ("rollouts/{id}/close", self._close, "POST"),
            ("forget", self._forget, "POST"),
            ("steps", self._start_step, "POST"),
            ("steps", self._steps, "GET"),
            ("steps/{step:int}", self._step, "GET"),
        ]
        return [Route(CONTROL + path, _safely(handler), methods=[method]) for path, handler, method in table]

    async def _status(self, _: Request) -> Response:
        s = self._s
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                engine = await s.engine.metrics()
        except (EngineError, TimeoutError):
            engine = None  # busy or restarting: the children say which
        counts = await s.store.counts()
        return _json(
            {
                "policies": [await self._policy()],
                "children": [child.state() for child in s.children],
                "rollouts": counts,
                "proxy": s.counters(),
                "engine": engine,
                "replicas": s.engine.state(),
                "store": {"path": str(s.store.path), "broken": s.store.broken},
                "step_running": s.steps.running(),
                "uptime": time.time() - s.started,
            }
        )

    async def _policy(self) -> dict[str, Any]:
        s = self._s
        return {
            "name": s.policies.name,
            "base_model": s.policy_file.base_model,
            "digest": s.policy_file.digest,
            "version": s.policies.newest,
            "pinned": s.policies.fixed,
            "set_aside": s.policies.set_aside,
            "versions": sorted(s.policies.loaded),
            "models": s.policies.models,
            "capture": s.policies.capture.value,
            "exact_prompts": s.policies.exact_prompts,
            "step": await s.steps.last_step(),
        }

    async def _register(self, request: Request) -> Response:
        body = await _body(request, _Register)
        try:
            self._s.policy_file.check(body.config)
            self._s.sessions.settings(body.config)
        except ConfigError as problem:
            raise ConflictError(str(problem)) from None
        return _json(await self._policy())

    async def _open(self, request: Request) -> Response:
        body = await _body(request, _Open)
        self._known(body.policy)
        rollout, token = await self._s.sessions.open(
            purpose=body.purpose,
            scenario_id=body.scenario_id,
            scenario=body.scenario,
            step=body.step,
            group=body.group,
            sample=body.sample,
            version=body.version,
        )
        reply = {"id": rollout.id, "token": token, "version": rollout.version, "base_url": f"{self._s.url}/v1"}
        return _json(reply, 201)

    async def _close(self, request: Request) -> Response:
        body = await _body(request, _Close)
        rollout = await self._s.sessions.close(
            request.path_params["id"],
            output=body.output,
            reward=body.reward,
            metrics=body.metrics,
            scored_by=body.scored_by,
            error=body.error,
            fault=body.fault,
        )
        return _json(_dump(rollout))

    async def _show(self, request: Request) -> Response:
        rollout_id = request.path_params["id"]
        rollout = await self._s.store.rollout(rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r}")
        trained = await self._s.store.trained(rollout_id)
        items = [{"step": entry["step"], **item} for entry in trained for item in entry["calls"]]
        return _json({**_dump(rollout), "training": items})

    async def _list(self, request: Request) -> Response:
        filters = _query(request, _Filters)
        found = await self._s.store.rollouts(
            policy=filters.policy,
            step=filters.step,
            purpose=filters.purpose,
            closed=filters.closed,
            group=filters.group,
            limit=filters.limit,
            after=filters.after,
            prefix=filters.prefix,
            newest=filters.newest,
        )
        return _json({"rollouts": [_dump(rollout) for rollout in found]})

    async def _forget(self, request: Request) -> Response:
        forgotten, examples = await self._s.retention.forget((await _body(request, _Forget)).subject)
        counts = {"rollouts": len(forgotten.rollouts), "calls": forgotten.calls, "examples": examples}
        return _json({**counts, "versions": forgotten.versions})

    async def _start_step(self, request: Request) -> Response:
        body = await _body(request, _Step)
        self._known(body.policy)
        try:
            self._s.policy_file.check(body.config)
        except ConfigError as problem:
            raise ConflictError(str(problem)) from None
        if body.examples is not None and body.rollout_ids is not None:
            raise ConfigError("a step learns from rollouts or from examples, not from both")
        report = await self._s.steps.submit(body.step, body.rollout_ids, body.config, body.examples)
        return _json({"job": f"{body.policy}.{body.step}", **report.model_dump(mode="json")}, 202)

    async def _steps(self, request: Request) -> Response:
        policy = _query(request, _PolicyQuery).policy
        self._known(policy)
        return _json({"steps": await self._s.store.steps(policy)})

    async def _step(self, request: Request) -> Response:
        query = _query(request, _StepQuery)
        self._known(query.policy)
        step = request.path_params["step"]
        report = await self._s.steps.wait(step, min(query.wait, MAX_WAIT))
        if report is None:
            raise NotFoundError(f"training step {step} was never asked for")
        return _json(report.model_dump(mode="json"))

    def _known(self, policy: str) -> None:
        if policy != self._s.policies.name:
            raise NotFoundError(f"there is no policy {policy!r} here; this server serves {self._s.policies.name!r}")


def _safely(handler: Handler) -> Handler:
    """Errors in clear words; what is unforeseen is logged with its traceback and answered without it."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ArtError as problem:
            status, code = _status_of(problem)
            if status >= 500:
                log.error("%s %s: %s", request.method, request.scope["path"], problem)
            return error(status, code, str(problem), {"retry-after": "1"} if status == 503 else None)
        except Exception:  # boundary: a fault in one handler must not end a connection without a word
            log.exception("%s %s failed", request.method, request.scope["path"])
            return error(500, "internal_error", "the server failed on this request; see its log")

    return handle


_STATUS: list[tuple[type[ArtError], int, str]] = [  # the first that fits
    (NotFoundError, 404, "not_found"),
    (ConflictError, 409, "conflict"),
    (StoreError, 503, "store_unavailable"),
    (ConfigError, 400, "invalid_request"),
    (ScenarioError, 400, "invalid_request"),
    (AdapterError, 409, "adapter_unusable"),
    (EngineError, 503, "engine_unavailable"),
    (ServerError, 503, "unavailable"),
]


class _TooLargeError(ConfigError):
    """A request's body is too large or too slow."""


def _status_of(problem: ArtError) -> tuple[int, str]:
    if isinstance(problem, _TooLargeError):
        return 413, "too_large"
    for kind, status, code in _STATUS:
        if isinstance(problem, kind):
            return status, code
    return 500, "error"


def _json(content: Any, status: int = 200) -> Response:
    try:
        encoded = orjson.dumps(content)
    except orjson.JSONEncodeError:  # lone surrogates, integers beyond 64 bits: an agent's data may hold them
        encoded = json.dumps(content).encode()
    return Response(encoded, status, media_type="application/json")


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"the request is no JSON: {problem}") from None


def _dump(rollout: Rollout) -> dict[str, Any]:
    return rollout.model_dump(mode="python")


async def _body(request: Request, model: type[M]) -> M:
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > BODY_BYTES:
                    raise _TooLargeError(f"the request is larger than {BODY_BYTES} bytes")
                parts.append(part)
    except TimeoutError:
        raise _TooLargeError(f"the request did not arrive within {BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise ConfigError("the client went away") from None
    return _validated(model, _parse(b"".join(parts)))


def _query(request: Request, model: type[M]) -> M:
    pairs = request.query_params.multi_items()
    if len({key for key, _ in pairs}) != len(pairs):
        raise ConfigError("a parameter is given twice")
    return _validated(model, dict(pairs))


def _validated(model: type[M], content: Any) -> M:
    try:
        return model.model_validate(content)
    except ValidationError as problem:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'request'}: {item['msg']}" for item in problem.errors()]
        raise ConfigError("; ".join(lines)) from None
