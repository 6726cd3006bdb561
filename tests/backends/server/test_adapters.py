"""Versions on several servers: at all or at none, what a refusal means, and what a server gets before it comes back."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from art_backends.errors import AdapterError, EngineError
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.replicas import Replicas
from art_backends.server.adapters import NOT_TAKEN, Adapters
from art_backends.server.policy import PolicyTable
from art_backends.training import versions
from starlette.requests import Request
from starlette.responses import Response

from tests.backends.proxy.fake_engine import WAIT, serving
from tests.backends.server.fake_worker import BASE, Fake, refused


class Server(Fake):
    """A server whose loads and calls can be made to fail as vLLM's do."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(argparse.Namespace(versions=folder, faults=folder))
        self.refusal: tuple[int, str] | None = None  # of loads
        self.broken: set[str] = set()  # models whose calls get a 500
        self.well = True
        self.salts: list[str] = []
        self.loads: list[str] = []
        self.paths: list[str] = []
        self.loading = asyncio.Event()
        self.allow = asyncio.Event()
        self.allow.set()

    async def load(self, request: Request) -> Response:
        body = await request.json()
        self.loads.append(body["lora_name"])
        self.paths.append(body["lora_path"])
        self.loading.set()
        await self.allow.wait()
        if self.refusal is not None:
            code, message = self.refusal
            return refused(code, message, "InternalServerError")
        return await super().load(request)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.salts.append(body.get("cache_salt", ""))
        if body["model"] in self.broken:
            return refused(500, "Out of range float values are not JSON compliant", "InternalServerError")
        return await super().chat(request)

    async def models(self, request: Request) -> Response:
        if request.url.path == "/health" and not self.well:
            return Response(status_code=503)
        return await super().models(request)


@dataclass
class Site:
    servers: list[Server]
    clients: list[EngineClient]
    replicas: Replicas
    policies: PolicyTable
    adapters: Adapters
    folder: Path

    def make(self, *numbers: int) -> None:
        """Versions on disk."""
        for number in numbers:
            with versions.new_version(self.folder, "policy", number) as place:
                state = {"format": 1, "policy": "policy", "version": number, "step": number, "rollout_ids": []}
                versions.write_file(place / versions.STATE, versions.encode_json({**state, "metrics": {}}))

    def loaded(self) -> list[list[str]]:
        return [sorted(server.loaded) for server in self.servers]

    def states(self) -> list[str]:
        return [item["state"] for item in self.replicas.state()]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    servers = [Server(tmp_path / f"server-{number}") for number in range(2)]
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(serving(server.app())) for server in servers]
        clients = [EngineClient(url=f"http://127.0.0.1:{port}") for port in ports]
        replicas = Replicas(clients, names=["left", "right"], up_seconds=600, out_seconds=0.01)
        stack.push_async_callback(replicas.aclose)
        policies = PolicyTable("policy", base_model=BASE)
        folder = tmp_path / "versions"
        folder.mkdir()
        adapters = Adapters(replicas, policies, folder)
        replicas.on_back = adapters.reload
        made = Site(servers, clients, replicas, policies, adapters, folder)
        made.make(1, 2, 3)
        yield made


async def test_a_version_is_loaded_and_tried_at_every_server(site: Site) -> None:
    await site.adapters.load(1)
    assert (site.loaded(), site.policies.loaded) == ([["policy@1"]] * 2, {0, 1})
    assert [server.calls for server in site.servers] == [1, 1], "each was tried"
    salts = [salt for server in site.servers for salt in server.salts]
    assert all(salts), "what a trial computed is no other adapter's to find in the prefix cache"
    await site.adapters.load(1)
    assert [server.loads for server in site.servers] == [["policy@1"]] * 2, "once"


async def test_if_one_refuses_the_old_version_stays_everywhere(site: Site) -> None:
    await site.adapters.load(1)
    site.servers[1].refusal = (400, "the files are read by somebody else")
    with pytest.raises(EngineError, match=r"policy@2 is served nowhere: right refused it .*somebody else") as error:
        await site.adapters.load(2)
    assert error.value.code == NOT_TAKEN, "another server took it: the files are in order"
    assert (site.loaded(), site.policies.loaded, site.states()) == ([["policy@1"]] * 2, {0, 1}, ["up", "up"])
    site.servers[1].refusal = None
    await site.adapters.load(2)
    assert site.loaded() == [["policy@1", "policy@2"]] * 2


async def test_what_every_server_refuses_is_unusable(site: Site) -> None:
    for server in site.servers:
        server.refusal = (500, "Error while deserializing header: incomplete metadata")
    with pytest.raises(AdapterError, match=r"left refused it .*incomplete.*right refused it"):
        await site.adapters.load(1)
    assert (site.loaded(), site.policies.loaded) == ([[], []], {0})


async def test_weights_that_are_no_numbers_are_found_by_trying(site: Site) -> None:
    for server in site.servers:
        server.broken.add("policy@1")
    with pytest.raises(AdapterError, match="does not answer: Out of range"):
        await site.adapters.load(1)
    assert (site.loaded(), site.states()) == ([[], []], ["up", "up"])
    (site.servers[0].faults / "nan_logprobs").touch()
    with pytest.raises(EngineError, match=r"left refused it .*not finite"):
        await site.adapters.load(2)
    assert site.loaded() == [[], []]


async def test_a_server_that_fails_and_is_not_well_says_nothing_of_the_adapter(site: Site) -> None:
    site.servers[0].broken.add("policy@1")
    site.servers[0].well = False
    await site.adapters.load(1)
    assert (site.states(), site.policies.loaded) == (["out", "up"], {0, 1})


async def test_without_a_server_there_is_no_swap(site: Site) -> None:
    for server in site.servers:
        server.refusal, server.well = (500, "EngineCore encountered an issue"), False
    with pytest.raises(EngineError, match="EngineCore"):
        await site.adapters.load(1)
    assert (site.states(), site.policies.loaded) == (["out", "out"], {0})
    with pytest.raises(EngineError, match="no engine server takes calls"):
        await site.adapters.load(1)


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ((500, "LoRA rank 64 is greater than max_lora_rank 16."), "--max-lora-rank"),
        ((500, "LoRA is not enabled. Use --enable-lora to enable LoRA."), "--enable-lora"),
        ((404, "Not Found"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ((404, "Loading lora policy@1 failed: No adapter found for <path>"), "shared folder"),
    ],
)
async def test_what_is_the_server_s_matter_is_said_with_what_to_do(
    site: Site, refusal: tuple[int, str], hint: str
) -> None:
    (site.folder / "policy@1" / "adapter_model.safetensors").touch()
    for server in site.servers:
        server.refusal = refusal
    with pytest.raises(EngineError, match=hint) as error:
        await site.adapters.load(1)
    assert (error.value.code, site.states()) == (NOT_TAKEN, ["up", "up"])
    assert versions.read_version(site.folder, "policy", 1) is not None, "it is no reason to set a version aside"


async def test_a_name_of_somebody_else_s_is_not_believed(site: Site) -> None:
    for server in site.servers:
        server.loaded["policy@1"] = "/another/run/policy@1"
    await site.adapters.load(1)
    assert [Path(server.loaded["policy@1"]) for server in site.servers] == [site.folder / "policy@1"] * 2


async def test_other_weights_under_a_name_are_loaded_from_a_path_of_another_spelling(site: Site) -> None:
    """vLLM's prefix cache goes by name and path, and outlives the adapter."""
    (site.folder / "policy@1" / "adapter_model.safetensors").write_bytes(b"one")
    site.servers[0].broken.add("policy@1")
    site.servers[1].broken.add("policy@1")
    with pytest.raises(AdapterError):
        await site.adapters.load(1)
    tried = site.servers[0].paths[0]
    site.adapters.set_aside(1, "broken")
    site.make(1)
    (site.folder / "policy@1" / "adapter_model.safetensors").write_bytes(b"another")
    for server in site.servers:
        server.broken.clear()
    await site.adapters.load(1)
    made_again = site.servers[0].paths[-1]
    assert made_again != tried
    assert Path(made_again) == Path(tried) == site.folder / "policy@1"
    site.servers[1].loaded.clear()
    await site.adapters.reload(site.clients[1])
    assert site.servers[1].paths[-1] == made_again, "the same weights are spelled alike"


async def test_a_server_that_comes_back_has_what_the_others_have(site: Site) -> None:
    for number in (1, 2):
        await site.adapters.load(number)
    site.policies.pin(1)
    site.replicas.take_out(site.clients[1], "it was restarted")
    site.servers[1].loaded = {"policy@9": "left over", "another": "not ours"}
    await site.adapters.load(3)
    site.policies.move(3)
    assert await site.adapters.unload_idle() == [2]
    assert site.loaded() == [["policy@1", "policy@3"], ["another", "policy@9"]]
    await site.replicas.start()
    await site.replicas.wait_ready(WAIT)
    async with asyncio.timeout(WAIT):
        while site.states() != ["up", "up"]:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
    assert site.loaded() == [["policy@1", "policy@3"], ["another", "policy@1", "policy@3"]]


async def test_a_swap_waits_for_a_server_that_is_coming_back(site: Site) -> None:
    await site.adapters.load(1)
    site.replicas.take_out(site.clients[1], "it was restarted")
    site.servers[1].loaded = {}
    site.servers[1].allow.clear()
    site.servers[1].loading.clear()
    await site.replicas.start()
    await asyncio.wait_for(site.servers[1].loading.wait(), WAIT)
    assert site.states() == ["up", "coming back"]
    swap = asyncio.create_task(site.adapters.load(2))
    site.servers[1].allow.set()
    await asyncio.wait_for(swap, WAIT)
    assert site.states() == ["up", "up"]
    assert site.loaded() == [["policy@1", "policy@2"]] * 2


async def test_a_server_that_cannot_be_given_all_stays_out(site: Site) -> None:
    await site.adapters.load(1)
    site.servers[1].loaded, site.servers[1].refusal = {}, (500, "LoRA rank 8 is greater than max_lora_rank 4.")
    with pytest.raises(EngineError, match="max_lora_rank"):
        await site.adapters.reload(site.clients[1])


async def test_an_idle_version_stays_if_nobody_unloads_it(site: Site) -> None:
    await site.adapters.load(1)
    await site.adapters.load(2)
    site.policies.move(2)
    for server in site.servers:
        server.loaded.pop("policy@1")  # a 404 is what is wanted
    assert await site.adapters.unload_idle() == [1]
    await site.adapters.load(3)
    site.policies.move(3)

    async def down(*_: Any, **__: Any) -> None:
        raise EngineError("the engine cannot be reached", 503, "engine_unreachable")

    for client in site.clients:
        client.unload_adapter = down  # type: ignore[method-assign]
    assert await site.adapters.unload_idle() == []
    assert site.policies.loaded == {0, 2, 3}
