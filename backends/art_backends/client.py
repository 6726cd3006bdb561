"""The control API's client: open and close rollouts, ask for training steps, read what was recorded.

Every request has a deadline. What the server refuses is a ``ControlError`` with its words; a server that cannot be
reached is a ``ServerError`` that says what to do. Requests that may be repeated safely (all but opening a rollout) are
repeated a few times when the connection broke.

It refuses to go through a proxy of the environment, to follow redirects, and to know SQL, torch or the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art_backends.config import TrainConfig
from art_backends.errors import ControlError, ServerError, TrainingError, revive
from art_backends.trajectories import Purpose, Rollout, RolloutError

PREFIX = "/control/v1"
CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 120.0
POLL_SECONDS = 20.0  # how long the server holds one poll of a step
TRIES = 4  # of a request that may be repeated

M = TypeVar("M", bound=BaseModel)


class _Reply(BaseModel):
    """Base of replies: fields that a newer server adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class OpenRollout(_Reply):
    """A rollout to run an agent in. ``token`` is its secret, ``base_url`` the OpenAI-compatible address."""

    id: str
    token: str = Field(repr=False)
    version: str
    base_url: str


class Forgotten(_Reply):
    """What was deleted, and the adapter versions, "NAME@N", that learned from it and still stand."""

    rollouts: int
    calls: int
    examples: int
    versions: list[str] = Field(default_factory=list)


class StepProgress(_Reply):
    packs_done: int = 0
    packs: int = 0


class StepOutcome(_Reply):
    """What a training step did. ``version`` is the policy's newest version after it."""

    kind: Literal["committed", "skipped"]
    version: int
    reason: str | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    tokens: dict[str, list[dict[str, Any]]] = Field(default_factory=dict)
    excluded: dict[str, str] = Field(default_factory=dict)  # rollouts that were left out, and why


class StepReport(_Reply):
    """Where a step stands."""

    state: Literal["running", "done", "failed"]
    progress: StepProgress = Field(default_factory=StepProgress)
    outcome: StepOutcome | None = None
    error: dict[str, str] | None = None


class Client:
    """Speaks to one server. ``await aclose()`` or ``async with`` when done; use it in one event loop."""

    def __init__(self, url: str, token: str, *, request_seconds: float = REQUEST_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(request_seconds, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=20),
            trust_env=False,  # a proxy of the environment must not see rollout tokens, nor break loopback
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def status(self) -> dict[str, Any]:
        """Policies, children, counts of rollouts and calls, the engine's figures, uptime in seconds."""
        return _object(await self._ask("GET", "/status"))

    async def register(self, config: TrainConfig) -> dict[str, Any]:
        """Tell the server the run's settings; returns the policy's status.

        ControlError (409) if the server serves another base model or adapter shape; it names the setting.
        """
        body = {"config": config.model_dump(mode="json")}
        return _object(await self._ask("POST", "/policies", body))

    async def open_rollout(
        self,
        *,
        policy: str,
        purpose: Purpose | Literal["train", "eval"] = Purpose.TRAIN,
        scenario_id: str = "",
        scenario: Any = None,
        step: int | None = None,
        group: str = "",
        sample: int = 0,
        version: int | None = None,
    ) -> OpenRollout:
        """Open a rollout; it is pinned to ``version`` (a number; default: the newest) until it is closed."""
        body = {
            "policy": policy,
            "purpose": Purpose(purpose).value,
            "scenario_id": scenario_id,
            "scenario": scenario,
            "step": step,
            "group": group,
            "sample": sample,
            "version": version,
        }
        return _parsed(OpenRollout, await self._ask("POST", "/rollouts", body, repeat=False))

    async def close_rollout(
        self,
        rollout_id: str,
        *,
        output: Any = None,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        scored_by: str | None = None,
        error: RolloutError | None = None,
        fault: str | None = None,
    ) -> Rollout:
        """Close a rollout with its outcome; repeating it with the same outcome is a no-op, with another a 409."""
        body = {
            "output": output,
            "reward": reward,
            "metrics": dict(metrics or {}),
            "scored_by": scored_by,
            "error": None if error is None else error.model_dump(mode="json"),
            "fault": fault,
        }
        return _parsed(Rollout, await self._ask("POST", f"/rollouts/{_segment(rollout_id)}/close", body))

    async def rollout(self, rollout_id: str) -> Rollout:
        """A rollout with its calls; ControlError (404) if there is none of this id."""
        return (await self.rollout_with_training(rollout_id))[0]

    async def rollout_with_training(self, rollout_id: str) -> tuple[Rollout, list[dict[str, Any]]]:
        """A rollout with its calls, and what was trained of it.

        The second part has an item per sampled answer: {"step", "call", "choice", "trained", "advantage", "excluded"}.
        """
        reply = _object(await self._ask("GET", f"/rollouts/{_segment(rollout_id)}"))
        training = reply.pop("training", [])
        return _parsed(Rollout, reply), training

    async def rollouts(
        self,
        *,
        policy: str | None = None,
        step: int | None = None,
        purpose: Purpose | Literal["train", "eval", "traffic"] | None = None,
        closed: bool | None = None,
        group: str | None = None,
        limit: int | None = None,
        after: str | None = None,
        prefix: str | None = None,
        newest: bool | None = None,
    ) -> list[Rollout]:
        """Rollouts without their calls, in order of opening; ``after`` is the last id of the page before.

        ``prefix``: those whose ids begin so. ``newest``: where there are more than ``limit``, the last of them.
        """
        filters = {
            "policy": policy,
            "step": step,
            "purpose": None if purpose is None else Purpose(purpose).value,
            "closed": None if closed is None else str(closed).lower(),
            "group": group,
            "limit": limit,
            "after": after,
            "prefix": prefix,
            "newest": None if newest is None else str(newest).lower(),
        }
        given = {key: str(value) for key, value in filters.items() if value is not None}
        reply = _object(await self._ask("GET", "/rollouts", parameters=given))
        return [_parsed(Rollout, item) for item in reply.get("rollouts", [])]

    async def forget(self, subject: str) -> Forgotten:
        """Delete all that was kept about a subject, open rollouts too; asking again is safe."""
        return _parsed(Forgotten, await self._ask("POST", "/forget", {"subject": subject}))

    async def steps(self, policy: str) -> list[dict[str, Any]]:
        """The recorded outcomes of a policy's steps, in order, each with its "step"."""
        reply = _object(await self._ask("GET", "/steps", parameters={"policy": policy}))
        return list(reply.get("steps", []))

    async def start_step(
        self,
        step: int,
        config: TrainConfig,
        *,
        rollout_ids: Sequence[str] | None = None,
        examples: Sequence[Mapping[str, Any]] | None = None,
    ) -> StepReport:
        """Ask for a training step and return at once; asking again joins it (or gives its outcome)."""
        body = {
            "policy": config.name,
            "step": step,
            "rollout_ids": None if rollout_ids is None else list(rollout_ids),
            "examples": None if examples is None else list(examples),
            "config": config.model_dump(mode="json"),
        }
        return _parsed(StepReport, await self._ask("POST", "/steps", body))

    async def step_report(self, step: int, policy: str, *, wait: float = 0.0) -> StepReport:
        """Where a step stands; the server holds the answer up to ``wait`` seconds until it has ended."""
        parameters = {"policy": policy, "wait": f"{wait:g}"}
        return _parsed(StepReport, await self._ask("GET", f"/steps/{step}", parameters=parameters, extra=wait))

    async def train_step(
        self,
        step: int,
        config: TrainConfig,
        *,
        rollout_ids: Sequence[str] | None = None,
        examples: Sequence[Mapping[str, Any]] | None = None,
        progress: Callable[[StepProgress], None] | None = None,
        deadline: float | None = None,
    ) -> StepOutcome:
        """Make training step ``step`` (1-based) from these rollouts and wait until its adapter is served.

        ``rollout_ids`` None: every closed training rollout of this step. With ``examples`` (objects with ``messages``
        and perhaps ``tools``) the step imitates their assistant's messages instead. A step that was made already gives
        its outcome at once. Raises the worker's error (TrainingError and its kin), and TrainingError after ``deadline``
        seconds (the step goes on at the server; asking again joins it).
        """
        try:
            async with asyncio.timeout(deadline):
                report = await self.start_step(step, config, rollout_ids=rollout_ids, examples=examples)
                while report.state == "running":
                    if progress is not None:
                        progress(report.progress)
                    report = await self.step_report(step, config.name, wait=POLL_SECONDS)
        except TimeoutError:
            raise TrainingError(
                f"training step {step} was not done within {deadline:g} s; it goes on: ask for it again to join it"
            ) from None
        if progress is not None:
            progress(report.progress)
        if report.state == "failed" or report.outcome is None:
            said = report.error or {}
            raise revive(said.get("type", ""), said.get("message", f"training step {step} failed without a word"))
        return report.outcome

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        parameters: Mapping[str, str] | None = None,
        repeat: bool = True,
        extra: float = 0.0,
    ) -> Any:
        content = None if body is None else _encoded(body)
        headers = {} if content is None else {"content-type": "application/json"}
        timeout = self._http.timeout
        if extra and timeout.read is not None:
            timeout = httpx.Timeout(timeout.read + extra, connect=CONNECT_SECONDS)
        for attempt in range(1, TRIES + 1):
            try:
                reply = await self._http.request(
                    method, PREFIX + path, content=content, params=parameters, headers=headers, timeout=timeout
                )
                return _answer(reply)
            except httpx.TimeoutException as error:
                raise ServerError(
                    f"{self.url}: no answer to {method} {path} ({type(error).__name__}); "
                    "look at `art-backends status` and the folder's logs/server.log"
                ) from error
            except httpx.TransportError as error:
                if attempt == TRIES or (not repeat and not isinstance(error, httpx.ConnectError)):
                    raise ServerError(
                        f"{self.url}: the server cannot be reached ({error or type(error).__name__}); start it with "
                        "`art-backends serve`, or look at why it ended in the folder's logs/server.log"
                    ) from error
            await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable")


def policy_of(status: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The policy of that name in a server's status; ServerError if it has none."""
    for policy in status.get("policies", []):
        if policy.get("name") == name:
            return dict(policy)
    raise ServerError(f"the server has no policy {name!r}; start it with the settings of this run")


def _encoded(body: Mapping[str, Any]) -> bytes:
    """JSON in ASCII: an agent's output may hold lone surrogates, which no UTF-8 encoder takes."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ControlError(f"what is sent to the server is not JSON: {error}", 400, "invalid_request") from None


def _segment(value: str) -> str:
    """An id as one path segment; only ids that the server could have made pass."""
    if not value or not all(character.isalnum() or character in "-_" for character in value):
        raise ControlError(f"{value!r} is no rollout id", 404, "not_found")
    return value


def _answer(reply: httpx.Response) -> Any:
    try:
        content = reply.json()
    except ValueError:
        content = None
    if reply.is_success and content is not None:
        return content
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        raise ControlError(str(error.get("message")), reply.status_code, str(error.get("code") or "error"))
    raise ControlError(
        f"{reply.request.url}: not the control API's answer (HTTP {reply.status_code}); "
        "does another program listen there?",
        reply.status_code,
        "bad_reply",
    )


def _object(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ControlError("the server's answer is not an object", 502, "bad_reply")
    return content


def _parsed(kind: type[M], content: Any) -> M:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ControlError(
            f"the server's answer is not a {kind.__name__}; is it of another release? {error}", 502, "bad_reply"
        ) from None
