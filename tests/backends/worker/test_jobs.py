"""The job API over ASGI, with a trainer whose steps end when the test says so."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from art_backends.config import TrainConfig
from art_backends.errors import NonFiniteError
from art_backends.training.requests import StepOutcome, StepRequest
from art_backends.worker import jobs as module
from art_backends.worker.jobs import Jobs
from starlette.applications import Starlette

DEADLINE = 20.0


class HeldTrainer:
    """Each step waits until it is released, or until it is told to end."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.began: asyncio.Queue[StepRequest] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.failure: Exception | None = None
        self.progress: Callable[[int, int], None] | None = None
        self.threads: set[str] = set()
        self.cancelled = False

    def step(self, request, progress, cancelled) -> StepOutcome:
        self.threads.add(threading.current_thread().name)
        self.progress = progress
        progress(1, 4)
        self.loop.call_soon_threadsafe(self.began.put_nowait, request)
        while not self.release.wait(0.01):
            if cancelled():
                self.cancelled = True
                break
        if self.failure is not None:
            raise self.failure
        return StepOutcome(kind="committed", version=request.from_version + 1, metrics={"loss": 0.5})


@pytest.fixture
async def trainer() -> HeldTrainer:
    return HeldTrainer()


@pytest.fixture
async def http(trainer) -> AsyncIterator[httpx.AsyncClient]:
    jobs = Jobs(trainer)
    transport = httpx.ASGITransport(Starlette(routes=jobs.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=DEADLINE) as client:
        yield client
    trainer.release.set()
    await jobs.close()


def body(step: int = 1, from_version: int = 0) -> dict:
    request = StepRequest(
        policy="policy", from_version=from_version, versions="/versions", step=step, config=TrainConfig(), groups=[]
    )
    return request.model_dump(mode="json")


async def done(http: httpx.AsyncClient, job: str) -> dict:
    async with asyncio.timeout(DEADLINE):
        while True:
            report = (await http.get(f"/train/{job}", params={"wait": "10"})).json()
            if report["state"] != "running":
                return report


async def test_a_step_from_start_to_outcome(http, trainer):
    started = await http.post("/train", json=body())
    assert (started.status_code, started.json()) == (202, {"job": "policy@0.1"})
    request = await asyncio.wait_for(trainer.began.get(), DEADLINE)
    assert (request.policy, request.step) == ("policy", 1)
    running = (await http.get("/train/policy@0.1")).json()
    assert running == {"state": "running", "progress": {"packs_done": 1, "packs": 4}, "outcome": None, "error": None}
    trainer.release.set()
    report = await done(http, "policy@0.1")
    assert report["state"] == "done"
    assert report["error"] is None
    assert StepOutcome.model_validate(report["outcome"]).version == 1


async def test_progress_is_told_while_it_runs(http, trainer):
    await http.post("/train", json=body())
    await asyncio.wait_for(trainer.began.get(), DEADLINE)
    trainer.progress(3, 4)
    assert (await http.get("/train/policy@0.1")).json()["progress"] == {"packs_done": 3, "packs": 4}


async def test_asking_again_joins_the_job(http, trainer):
    first = await http.post("/train", json=body())
    await asyncio.wait_for(trainer.began.get(), DEADLINE)
    again = await http.post("/train", json=body())
    assert (again.status_code, again.json()) == (202, first.json())
    trainer.release.set()
    await done(http, "policy@0.1")
    assert trainer.began.empty()  # it was made once


@pytest.mark.parametrize("other", [body(step=2), body(from_version=1)])
async def test_another_job_is_refused_while_one_runs(http, trainer, other):
    await http.post("/train", json=body())
    await asyncio.wait_for(trainer.began.get(), DEADLINE)
    refused = await http.post("/train", json=other)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "busy"
    assert "policy@0.1" in refused.json()["error"]["message"]
    trainer.release.set()
    await done(http, "policy@0.1")
    assert (await http.post("/train", json=other)).status_code == 202


async def test_a_poll_waits_for_the_end(http, trainer):
    await http.post("/train", json=body())
    await asyncio.wait_for(trainer.began.get(), DEADLINE)
    poll = asyncio.ensure_future(http.get("/train/policy@0.1", params={"wait": "20"}))
    trainer.release.set()
    assert (await asyncio.wait_for(poll, DEADLINE)).json()["state"] == "done"


async def test_a_poll_ends_at_its_deadline(http, trainer):
    await http.post("/train", json=body())
    report = (await asyncio.wait_for(http.get("/train/policy@0.1", params={"wait": "0.05"}), DEADLINE)).json()
    assert report["state"] == "running"


async def test_no_poll_waits_longer_than_the_most(http, trainer, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT", 0.05)
    await http.post("/train", json=body())
    for wait in ("1e9", "inf"):
        report = await asyncio.wait_for(http.get("/train/policy@0.1", params={"wait": wait}), DEADLINE)
        assert report.json()["state"] == "running"


@pytest.mark.parametrize("wait", ["soon", "nan"])
async def test_a_wait_that_is_no_time_is_refused(http, trainer, wait):
    await http.post("/train", json=body())
    reply = await asyncio.wait_for(http.get("/train/policy@0.1", params={"wait": wait}), DEADLINE)
    assert reply.status_code == 400
    assert "seconds" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NonFiniteError("loss was NaN"), {"type": "NonFiniteError", "message": "loss was NaN"}),
        (RuntimeError("a mistake"), {"type": "RuntimeError", "message": "a mistake"}),
        (MemoryError(), {"type": "MemoryError", "message": "MemoryError"}),
    ],
)
async def test_a_failure_is_the_jobs_report_and_the_next_job_runs(http, trainer, error, said):
    trainer.failure = error
    trainer.release.set()
    await http.post("/train", json=body())
    report = await done(http, "policy@0.1")
    assert (report["state"], report["outcome"], report["error"]) == ("failed", None, said)
    trainer.failure = None
    await http.post("/train", json=body())
    assert (await done(http, "policy@0.1"))["state"] == "done"


async def test_outcomes_are_kept_for_a_while(http, trainer, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    trainer.release.set()
    for step in (1, 2, 3):
        await http.post("/train", json=body(step))
        await done(http, f"policy@0.{step}")
    lost = await http.get("/train/policy@0.1")
    assert lost.status_code == 404
    assert lost.json()["error"]["code"] == "no_such_job"
    assert (await http.get("/train/policy@0.2")).json()["state"] == "done"


async def test_a_job_that_is_made_again_counts_as_new(http, trainer, monkeypatch):
    """A failed step is asked for again and again: it must not be the first that is forgotten."""
    monkeypatch.setattr(module, "KEPT", 2)
    trainer.release.set()
    for step in (1, 2, 1, 3):
        await http.post("/train", json=body(step))
        await done(http, f"policy@0.{step}")
    assert (await http.get("/train/policy@0.1")).status_code == 200
    assert (await http.get("/train/policy@0.2")).status_code == 404


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"policy": "p", "from_version": -1}'])
async def test_what_is_no_request_is_refused(http, trainer, content):
    reply = await http.post("/train", content=content)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_request"
    assert trainer.began.empty()


async def test_an_unknown_job_is_404(http):
    assert (await http.get("/train/policy@0.9")).status_code == 404


async def test_steps_run_in_one_thread_of_their_own(http, trainer):
    trainer.release.set()
    for step in (1, 2):
        await http.post("/train", json=body(step))
        await done(http, f"policy@0.{step}")
    assert len(trainer.threads) == 1
    assert threading.current_thread().name not in trainer.threads


async def test_close_ends_the_running_job(trainer):
    jobs = Jobs(trainer)
    transport = httpx.ASGITransport(Starlette(routes=jobs.routes()))
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://worker"))
        await http.post("/train", json=body())
        await asyncio.wait_for(trainer.began.get(), DEADLINE)
        await asyncio.wait_for(jobs.close(), DEADLINE)
    assert trainer.cancelled
