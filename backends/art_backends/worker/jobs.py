"""Training jobs over HTTP: ``POST /train`` starts one, ``GET /train/{job}?wait=SECONDS`` tells where it stands.

One job at a time, in one thread of its own, so that the engine beside it goes on answering. A job is named by what it
makes (policy, version it starts from, step): asking for the same again while it runs joins it, asking again when it is
done gives its outcome. What was committed before this process started is the trainer's to recognise.

It refuses a second job while one runs (409), and it never retries: that is the server's decision.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from art_backends.errors import TrainingError
from art_backends.training.requests import StepOutcome, StepRequest
from art_backends.worker.memory import give_back

log = logging.getLogger(__name__)

KEPT = 8  # finished jobs whose outcome can still be asked for
MAX_WAIT = 60.0  # seconds a poll may wait


class Steps(Protocol):
    """What makes a step: ``training.trainer.Trainer``."""

    def step(
        self, request: StepRequest, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> StepOutcome: ...


class Job:
    """One training step in flight or done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.packs_done = 0
        self.packs = 0
        self.outcome: StepOutcome | None = None
        self.error: dict[str, str] | None = None
        self.finished = asyncio.Event()

    def progress(self, done: int, total: int) -> None:
        self.packs_done, self.packs = done, total

    def report(self) -> dict[str, Any]:
        state = "running"
        if self.finished.is_set():
            state = "failed" if self.error else "done"
        return {
            "state": state,
            "progress": {"packs_done": self.packs_done, "packs": self.packs},
            "outcome": self.outcome.model_dump(mode="json") if self.outcome else None,
            "error": self.error,
        }


class Jobs:
    """The worker's training jobs. All methods but the thread's work run on the event loop."""

    def __init__(self, trainer: Steps, after: Callable[[], object] = give_back) -> None:
        """``after``: called in the trainer's thread when a job has ended, whatever came of it."""
        self._trainer = trainer
        self._after = after
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._jobs: dict[str, Job] = {}
        self._running: Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = threading.Event()

    def routes(self) -> list[Route]:
        return [
            Route("/train", self._start, methods=["POST"]),
            Route("/train/{job}", self._report, methods=["GET"]),
        ]

    async def close(self) -> None:
        """Ask the running job to end at its next pack and wait for it."""
        self._closing.set()
        if self._task is not None:
            await self._task
        self._executor.shutdown(wait=True)

    async def _start(self, request: Request) -> Response:
        try:
            step = StepRequest.model_validate_json(await request.body())
        except ValidationError as error:
            return _refused(400, "invalid_request", f"not a training request: {error}")
        name = f"{step.policy}@{step.from_version}.{step.step}"
        if self._running is not None:
            if self._running.name == name:
                return JSONResponse({"job": name}, 202)
            return _refused(409, "busy", f"the trainer is making {self._running.name}; ask again when it is done")
        job = Job(name)
        self._jobs.pop(name, None)  # made again, it is the newest
        self._jobs[name] = job
        while len(self._jobs) > KEPT:
            del self._jobs[next(iter(self._jobs))]
        self._running = job
        self._task = asyncio.get_running_loop().create_task(self._run(job, step))
        return JSONResponse({"job": name}, 202)

    async def _run(self, job: Job, step: StepRequest) -> None:
        loop = asyncio.get_running_loop()
        try:
            job.outcome = await loop.run_in_executor(self._executor, self._make, job, step)
        except TrainingError as error:
            job.error = {"type": type(error).__name__, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - boundary: a job's failure is its report, the engine must live on
            log.error("training job %s failed\n%s", job.name, traceback.format_exc())
            job.error = {"type": type(error).__name__, "message": str(error) or type(error).__name__}
        finally:
            self._running = None
            job.finished.set()

    def _make(self, job: Job, step: StepRequest) -> StepOutcome:
        try:
            return self._trainer.step(step, job.progress, self._closing.is_set)
        finally:
            self._after()

    async def _report(self, request: Request) -> Response:
        job = self._jobs.get(request.path_params["job"])
        if job is None:
            return _refused(404, "no_such_job", f"no job {request.path_params['job']!r} here; it may have been lost")
        try:
            wait = float(request.query_params.get("wait", "0"))
            if math.isnan(wait):
                raise ValueError("not a number")
        except ValueError:
            return _refused(400, "invalid_request", "wait must be a number of seconds")
        if wait > 0 and not job.finished.is_set():
            try:
                async with asyncio.timeout(min(wait, MAX_WAIT)):
                    await job.finished.wait()
            except TimeoutError:
                pass  # the report says "running"
        return JSONResponse(job.report())


def _refused(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)
