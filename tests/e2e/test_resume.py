"""kill -9 of loop, server and worker, then the same command: no closed rollout is lost, no step is made twice.

A reward that waits (``my_rewards:held``) stops the run in the middle of a step; what kills it is outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.backend import LocalServer
from art_backends.config import TrainConfig
from art_backends.store import Store
from art_backends.trajectories import Purpose

pytestmark = pytest.mark.timeout(400)

ROLLOUTS = 6  # of a step
SLOW_TRAINING = ["--updates-per-batch", "32", "--pack-tokens", "64"]  # long enough to be met in the middle
FILES = ("adapter_model.safetensors", "optimizer.safetensors", "state.json", "adapter_config.json")


def pids(project: Any) -> dict[str, int]:
    """Server and worker of the run folder, by what they say of themselves."""
    (worker,) = project.ask("/status")["children"]
    return {"server": json.loads((project.run / "server.json").read_text())["pid"], "worker": worker["pid"]}


def closed(run: Path, step: int) -> dict[str, Any]:
    """Closed, scored training rollouts of a step."""
    store = Store.open(run / "store.sqlite")
    try:
        found = store.rollouts(step=step, purpose=Purpose.TRAIN, closed=True, limit=1000, with_calls=True)
    finally:
        store.close()
    return {rollout.id: rollout for rollout in found if rollout.fault is None and rollout.reward is not None}


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.glob("versions/*/*"))}


def training(project: Any, step: int) -> bool:
    """Whether the trainer is in the middle of a step; the worker itself is asked, on its socket."""
    report = project.ask(f"/steps/{step}?policy=policy")
    assert report is None or report["state"] != "done", "the step was over before it could be interrupted"
    sockets = [re.search(r"--uds (\S+)", command) for command in project.processes().values()]
    found = next(filter(None, sockets), None)
    if report is None or found is None:
        return False
    transport = httpx.HTTPTransport(uds=found[1])
    try:
        with httpx.Client(base_url="http://worker", transport=transport, timeout=10) as client:
            progress = client.get(f"/train/policy@{step - 1}.{step}").json().get("progress", {})
    except httpx.TransportError:
        return False
    return bool(0 < progress.get("packs_done", 0) < progress["packs"] / 2)


def check_steps(project: Any, count: int) -> None:
    """Each step was made once, from rollouts of its own on the version before."""
    store = Store.open(project.run / "store.sqlite")
    try:
        steps = store.steps("policy")
    finally:
        store.close()
    assert [(item["step"], item["version"], item["kind"]) for item in steps] == [
        (step, step, "committed") for step in range(1, count + 1)
    ]
    used: set[str] = set()
    for item in steps:
        ids = set(item["rollout_ids"])
        assert ids == set(project.state(item["version"])["rollout_ids"])
        assert len(ids) == ROLLOUTS
        assert not ids & used
        used |= ids
        assert ids == set(closed(project.run, item["step"])), "a closed rollout of this step was not trained"
    report = project.report()
    assert (report["steps"], report["rollouts"], report["version"]) == (count, count * ROLLOUTS, f"policy@{count}")


def hold(project: Any, count: int) -> Callable[[], bool]:
    """Let the loop score ``count`` runs and then wait; gives what tells that it does."""
    (project.path / "waiting").unlink(missing_ok=True)
    (project.path / "hold").write_text(str(count))
    return (project.path / "waiting").exists


def release(project: Any) -> None:
    (project.path / "hold").unlink()


@pytest.mark.slow
def test_the_loop_is_killed_between_its_rollouts(
    project: Any, waiting: Callable[..., Any], to_end: Callable[..., Any]
) -> None:
    command = project.training("--steps", "2", "--concurrency", "1", reward="my_rewards:held")
    waits = hold(project, ROLLOUTS + 3)
    process = project.start("art-langgraph", *command)
    waiting(lambda: waits() or process.poll() is not None, 150)
    before = contents(project.run)
    process.kill()
    project.gone()
    kept = closed(project.run, 2)
    assert len(kept) == 3
    release(project)
    done = project.call("art-langgraph", *command, seconds=150)
    assert done.code == 0, done.err
    assert "step 1/2" not in done.out
    check_steps(project, 2)
    assert closed(project.run, 2).items() >= kept.items()
    assert contents(project.run).items() >= before.items()  # version 1, to the byte


@pytest.mark.slow
def test_the_worker_is_killed_and_the_run_goes_on(
    project: Any, waiting: Callable[..., Any], to_end: Callable[..., Any], tmp_path: Path
) -> None:
    """Killed while it trains and while rollouts run, under one command; what it makes then is what it would have."""
    command = project.training("--steps", "2", "--concurrency", "2", *SLOW_TRAINING, reward="my_rewards:held")
    process = project.start("art-langgraph", *command)
    waiting(lambda: training(project, 1), 150)
    waits = hold(project, ROLLOUTS + 2)
    os.kill(pids(project)["worker"], signal.SIGKILL)
    waiting(lambda: waits() or process.poll() is not None, 150)
    assert process.poll() is None, process.communicate()
    first = pids(project)
    os.kill(first["worker"], signal.SIGKILL)
    release(project)
    done = to_end(process, 200)
    assert done.code == 0, done.err
    check_steps(project, 2)
    assert project.report()["faults"] == 0
    assert "ended with code -9" in (project.run / "logs/server.log").read_text()

    # The same rollouts, without an interruption, on a copy of the folder from before the step.
    copy = tmp_path / "copy"
    shutil.copytree(project.run, copy)
    shutil.rmtree(copy / "versions/policy@1")
    shutil.rmtree(copy / "versions/policy@2")
    config = TrainConfig.model_validate(
        {**project.state(1)["config"], "base_model": str(project.model), "folder": copy}
    )

    async def again() -> None:
        async with LocalServer(config) as backend:
            status = await backend.client.status()
            assert status["policies"][0]["step"] == 0
            outcome = await backend.client.train_step(1, config, rollout_ids=project.state(1)["rollout_ids"])
            assert (outcome.kind, outcome.version) == ("committed", 1)

    asyncio.run(again())
    for name in FILES:
        one, other = ((folder / "versions/policy@1" / name).read_bytes() for folder in (project.run, copy))
        if name == "state.json":
            states = [json.loads(content) for content in (one, other)]
            for state in states:
                state["config"].pop("folder")
            assert states[0] == states[1]
        else:
            assert one == other, name


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["loop", "server", "worker"])
def test_killed_again_and_again(
    project: Any, waiting: Callable[..., Any], to_end: Callable[..., Any], victim: str
) -> None:
    """In the rollouts of step 1, in the training of step 2, at the commit of step 3; each time the same command."""
    # a fourth step, so that the run is not over by itself when the third is committed
    command = project.training("--steps", "4", *SLOW_TRAINING, "--concurrency", "2", reward="my_rewards:held")
    waits = hold(project, 2)
    kept: dict[str, Any] = {}
    before: dict[str, bytes] = {}
    process = project.start("art-langgraph", *command)
    moments = {
        1: waits,
        2: lambda: training(project, 2),
        3: (project.run / "versions/policy@3").exists,
    }
    for step, moment in moments.items():
        waiting(lambda: moment() or process.poll() is not None, 200, lambda: str(process.poll()))  # noqa: B023
        assert process.poll() is None, process.communicate()
        before |= contents(project.run)
        kept |= closed(project.run, step)
        if victim == "loop":
            process.kill()
        else:
            os.kill(pids(project)[victim], signal.SIGKILL)
        if step == 1:
            release(project)
        if victim != "worker":
            said = to_end(process, 100)
            project.gone()
            assert said.code == (-9 if victim == "loop" else 2)
            assert "Traceback" not in said.err
            if victim == "server":
                assert said.err.startswith("art-langgraph: ")
            kept |= closed(project.run, step)
            process = project.start("art-langgraph", *command)
    done = to_end(process, 200)
    assert done.code == 0, done.err
    check_steps(project, 4)
    now = {**closed(project.run, 1), **closed(project.run, 2), **closed(project.run, 3)}
    assert now.items() >= kept.items()
    assert contents(project.run).items() >= before.items()
