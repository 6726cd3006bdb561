"""After a crash at any point, store, engine and alias agree with what lies on disk."""

import asyncio
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from art_backends.errors import AdapterError
from art_backends.server.folder import write_pin


async def test_a_restart_goes_on_from_the_last_version(start: Any) -> None:
    async with start() as server:
        for step in (1, 2):
            await server.client.train_step(step, server.config, rollout_ids=await server.collect(step), deadline=60)
        left_open = await server.open()
        admin = server.admin
    async with start() as server:
        policy = await server.policy()
        assert (policy["version"], policy["step"]) == (2, 2)
        assert server.admin == admin
        assert (await server.chat(server.agent)).json()["choices"][0]["message"]["content"] == "policy@2 says hi"
        assert (await server.client.rollout(left_open.id)).fault == "interrupted"
        assert (await server.chat(left_open.token)).status_code == 200, "its agent may still be running"
        outcome = await server.client.train_step(3, server.config, rollout_ids=await server.collect(3), deadline=60)
        assert outcome.version == 3


async def test_a_step_committed_but_not_recorded_is_recorded(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)
    with sqlite3.connect(server.folder / "store.sqlite") as connection:
        connection.execute("DELETE FROM steps")
    connection.close()
    async with start() as server:
        assert (await server.policy())["version"] == 1
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)
        assert (outcome.kind, outcome.version, outcome.metrics) == ("committed", 1, {"loss": 0.5})
        assert len((server.faults / "jobs.log").read_text().splitlines()) == 1, "nothing was trained again"


async def test_versions_that_cannot_be_served_are_set_aside_and_made_again(start: Any) -> None:
    async with start() as server:
        for step in (1, 2, 3):
            await server.client.train_step(step, server.config, rollout_ids=await server.collect(step), deadline=60)
        ids = await server.collect(2)
    versions = server.folder / "versions"
    (versions / "policy@3" / "state.json").write_text('{"torn')
    state = json.loads((versions / "policy@2" / "state.json").read_text())
    (versions / "policy@2" / "state.json").write_text(json.dumps({**state, "base_digest": "of another model"}))
    (versions / ".tmp-policy@4-dead").mkdir()
    async with start() as server:
        policy = await server.policy()
        assert (policy["version"], policy["step"]) == (1, 1)
        (told,) = policy["set_aside"]
        assert "policy@2 could not be served" in told
        assert "made from another base model" in told
        names = {path.name.split("-")[0] for path in versions.iterdir()}
        assert names == {"policy@1", "policy@3", "broken"}
        outcome = await server.client.train_step(2, server.config, rollout_ids=ids, deadline=60)
        assert (outcome.kind, outcome.version) == ("committed", 2)


async def test_a_version_that_is_a_link_to_elsewhere_is_not_served(start: Any, tmp_path: Path) -> None:
    """Row S10: what a folder of versions holds may lead nowhere else."""
    async with start() as server:
        for step in (1, 2):
            await server.client.train_step(step, server.config, rollout_ids=await server.collect(step), deadline=60)
    versions = server.folder / "versions"
    (versions / "policy@2").rename(tmp_path / "elsewhere")
    (versions / "policy@2").symlink_to(tmp_path / "elsewhere")
    for name in ("policy@../policy@3", "policy@-1", "policy@٣", "policy@03x"):
        (versions / name).mkdir(parents=True)
    async with start() as server:
        policy = await server.policy()
        assert (policy["version"], policy["versions"]) == (1, [0, 1])
        assert (tmp_path / "elsewhere" / "state.json").exists()


async def test_the_versions_folder_may_be_gone(start: Any) -> None:
    async with start() as server:
        await server.client.train_step(1, server.config, rollout_ids=await server.collect(1), deadline=60)
    shutil.rmtree(server.folder / "versions")
    async with start() as server:
        policy = await server.policy()
        assert (policy["version"], policy["step"]) == (0, 0)


async def test_a_server_stopped_in_the_middle_of_a_step(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        server.fault("hold_job")
        await server.client.start_step(1, server.config, rollout_ids=ids)
        await server.engine.get("/test/held/job")
        poll = asyncio.create_task(server.client.step_report(1, "policy", wait=60))
        await server.http.get("/health")
        server.stop.set()
        async with asyncio.timeout(20):
            await server.task
        assert (await poll).state in ("running", "failed")
    async with start() as server:
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)
        assert (outcome.kind, outcome.version) == ("committed", 1)


async def test_a_pinned_version_answers_apps_while_training_goes_on(start: Any) -> None:
    async with start() as server:
        for step in (1, 2):
            await server.client.train_step(step, server.config, rollout_ids=await server.collect(step), deadline=60)
    write_pin(server.folder, 1)
    async with start() as server:
        policy = await server.policy()
        assert (policy["version"], policy["pinned"], policy["versions"]) == (2, 1, [0, 1, 2])
        assert (await server.chat(server.agent)).json()["choices"][0]["message"]["content"] == "policy@1 says hi"
        said = (await server.chat(server.agent, model="policy@2")).json()["choices"][0]["message"]["content"]
        assert said == "policy@2 says hi"  # asked for by its name
        missing = await server.chat(server.agent, model="policy@9")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        rollout = await server.open()
        assert rollout.version == "policy@2"
        outcome = await server.client.train_step(3, server.config, rollout_ids=await server.collect(3), deadline=60)
        assert outcome.version == 3
        assert (await server.policy())["pinned"] == 1
    write_pin(server.folder, 7)
    with pytest.raises(AdapterError, match=r"the pinned version cannot be served: .*policy@7.* unpin"):
        async with start():
            pass
