"""The worker's job API as the server uses it: hand over a step, wait for its report.

It refuses to retry: whether a lost job is asked for again is for ``steps`` to decide, which knows the supervisor.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from art_backends.client import StepReport
from art_backends.config import TrainConfig
from art_backends.errors import EngineError, TrainingError
from art_backends.proxy.engine_client import EngineClient, EngineReply
from art_backends.training.requests import StepRequest
from art_backends.trajectories import TrajectoryGroup

SUBMIT_SECONDS = 300.0
POLL_SECONDS = 10.0  # how long the worker holds a poll
ANSWER_SECONDS = 120.0  # until a poll must have been answered, beyond POLL_SECONDS
LOST = frozenset({404, 502, 503, 504})  # the worker is gone, or a new one that does not know the job


def encode(
    *,
    policy: str,
    from_version: int,
    versions: Path,
    step: int,
    config: TrainConfig,
    groups: list[TrajectoryGroup],
    imitate: bool = False,
) -> bytes:
    """The request's body. Slow for large batches: call it in a thread."""
    request = StepRequest(
        policy=policy,
        from_version=from_version,
        versions=versions,
        step=step,
        config=config,
        groups=groups,
        imitate=imitate,
    )
    return request.model_dump_json().encode()


async def submit(engine: EngineClient, content: bytes) -> str:
    """Start a job and return its name; EngineError with the status (one of LOST if the worker is away, 409 if busy)."""
    try:
        async with (
            asyncio.timeout(SUBMIT_SECONDS),
            engine.open("/train", content, first_byte_seconds=SUBMIT_SECONDS) as stream,
        ):
            reply = EngineReply(stream.status, stream.headers, await stream.read())
    except TimeoutError:
        raise EngineError(f"the worker took no job within {SUBMIT_SECONDS:.0f} s", 504, "worker_timeout") from None
    said = _content(reply)
    if reply.status != 202:
        raise _refused(reply, said)
    return str(said["job"])


async def report(engine: EngineClient, job: str) -> StepReport:
    """Where a job stands; the worker holds the answer until it has ended or POLL_SECONDS are over."""
    try:
        async with asyncio.timeout(POLL_SECONDS + ANSWER_SECONDS):
            reply = await engine.get(f"/train/{job}?wait={POLL_SECONDS:g}")
    except TimeoutError:
        raise EngineError(
            f"the worker did not say within {ANSWER_SECONDS:.0f} s where job {job} stands", 504, "worker_timeout"
        ) from None
    said = _content(reply)
    if reply.status != 200:
        raise _refused(reply, said)
    try:
        return StepReport.model_validate(said)
    except ValidationError as error:
        raise TrainingError(f"the worker's report on job {job} is not understood: {error}") from None


def _content(reply: EngineReply) -> dict[str, Any]:
    try:
        said = reply.json()
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise EngineError("the worker's answer is no JSON object", 502, "malformed_reply")
    return said


def _refused(reply: EngineReply, said: dict[str, Any]) -> EngineError:
    problem = said.get("error")
    details = problem if isinstance(problem, dict) else {}
    return EngineError(
        str(details.get("message") or f"the worker refused the job (HTTP {reply.status})"),
        reply.status,
        str(details.get("code") or "error"),
    )
