"""vLLM as the engine of whole runs, started by us: rollouts, steps, swaps, a crash. A tiny random model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from art_backends.client import Client, OpenRollout
from art_backends.config import TrainConfig
from art_backends.engines.embedded.render import HERMES_PATH
from art_backends.errors import ConfigError
from art_backends.server.run import serve
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.conftest import make_tokenizer
from tests.vllm.serving import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]
PROMPTS = ["Say a word.", "Say another one."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose heads are as wide as vLLM's attention for CPUs wants them."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 4096}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.1, **sizes, **heads, **ends)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Run:
    """A server on a folder, asked over HTTP as apps and loops ask it."""

    def __init__(self, config: TrainConfig, client: Client, http: httpx.AsyncClient) -> None:
        self.config = config
        self.client = client
        self.http = http

    async def chat(self, token: str, content: str, **more: Any) -> httpx.Response:
        body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
        headers = {"authorization": f"Bearer {token}"}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def app_or_refused(self, content: str) -> httpx.Response:
        """The answer to an app's call, greedily, or why there is none."""
        token = (self.config.folder / "agent.token").read_text().strip()
        return await self.chat(token, content, temperature=0)

    async def app(self, content: str) -> str:
        """What an app is answered."""
        reply = await self.app_or_refused(content)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    async def step(self, step: int) -> Any:
        """Rollouts of two turns in two groups, scored by their letters, and a training step on them."""
        ids = []
        for group in PROMPTS:
            for sample in range(4):
                rollout = await self.client.open_rollout(policy="policy", step=step, group=group, sample=sample)
                ids.append(rollout.id)
                text = await self.turns(rollout, group)
                reward = sum(character.isascii() and character.isalpha() for character in text) / (len(text) or 1)
                await self.client.close_rollout(rollout.id, reward=reward)
        return ids, await self.client.train_step(step, self.config, rollout_ids=ids)

    async def turns(self, rollout: OpenRollout, content: str) -> str:
        first = await self.chat(rollout.token, content)
        assert first.status_code == 200, first.text
        said = first.json()["choices"][0]["message"]["content"] or ""
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Go on."},
        ]
        second = await self.chat(rollout.token, "", messages=messages)
        assert second.status_code == 200, second.text
        return said + (second.json()["choices"][0]["message"]["content"] or "")


@contextlib.asynccontextmanager
async def running(config: TrainConfig) -> AsyncIterator[Run]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(config, on_ready=ready.set_result, stop=stop, drain_seconds=5))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    url = ready.result()
    async with (
        Client(url, (config.folder / "admin.token").read_text().strip()) as client,
        httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http,
    ):
        try:
            yield Run(config, client, http)
        finally:
            stop.set()
            await task


def settings(model: Path, python: Path, folder: Path, **more: Any) -> TrainConfig:
    values = {"rank": 2, "alpha": 4.0, "learning_rate": 1e-1, "max_model_len": 512, "concurrency": 8}
    return TrainConfig(base_model=str(model), folder=folder, engine="vllm", vllm=str(python), **{**values, **more})


async def test_rollouts_steps_swaps_and_a_crash(vllm_python: Path, model: Path, tmp_path: Path) -> None:
    config = settings(model, vllm_python, tmp_path / "run", vllm_sleep=True, max_sampler_kl=0.01)
    async with running(config) as run:
        before = await run.app("Hello?")
        ids, outcome = await run.step(1)
        assert (outcome.kind, outcome.version) == ("committed", 1), outcome
        assert outcome.metrics["sampling/kl"] < 1e-4
        assert outcome.metrics["sampling/ratio/max"] < 1.1
        calls = [call for rollout in ids for call in (await run.client.rollout(rollout)).calls]
        assert len(calls) == 16
        assert {(call.capture, call.prompt_mode) for call in calls} == {("tokens", "rendered"), ("tokens", "exact")}
        assert not any(call.drifted for call in calls)
        assert (await run.client.status())["policies"][0]["version"] == 1
        after = await run.app("Hello?")
        assert after != before, "the new version answers"

        (child,) = [one for one in (await run.client.status())["children"] if one["name"] == "vLLM"]
        os.kill(child["pid"], signal.SIGKILL)  # the launcher; its guard ends vLLM
        async with asyncio.timeout(400):
            while (await run.client.status())["children"][1]["restarts"] == 0:
                await run.app_or_refused("Hello?")  # waits while a new one starts
        assert await run.app("Hello?") == after, "it came back with its adapter"
        _, outcome = await run.step(2)
        assert (outcome.kind, outcome.version) == ("committed", 2)

    embedded = config.model_copy(update={"engine": "embedded", "vllm_sleep": False})
    async with running(embedded) as run:
        assert (await run.client.status())["policies"][0]["version"] == 2, "the same folder, another engine"
        (policy,) = (await run.client.status())["policies"]
        assert policy["capture"] == "tokens"


async def test_a_run_on_a_server_elsewhere(vllm_python: Path, model: Path, tmp_path: Path) -> None:
    """Started by hand with the flags of docs/vllm.md; without them the start says which are missing."""
    template = tmp_path / "chat_template.jinja"
    template.write_text(HERMES_PATH.read_text())
    flags = ["--dtype", "float32", "--max-model-len", "512", "--chat-template", str(template)]
    wanted = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-lora"]
    wanted += ["--max-lora-rank", "8", "--max-loras", "3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    values = {"rank": 2, "alpha": 4.0, "learning_rate": 1e-1, "max_model_len": 512}
    with serving(vllm_python, model, *flags, *wanted) as server:
        async with address(server.socket) as url:
            config = TrainConfig(base_model=str(model), folder=tmp_path / "run", engine_url=[url], **values)
            async with running(config) as run:
                before = await run.app("Hello?")
                _, outcome = await run.step(1)
                assert (outcome.kind, outcome.version) == ("committed", 1), outcome
                assert outcome.metrics["sampling/kl"] < 1e-4
                assert await run.app("Hello?") != before
                (replica,) = (await run.client.status())["replicas"]
                assert (replica["name"], replica["state"]) == (url, "up")
            longer = TrainConfig(**{**config.model_dump(), "folder": tmp_path / "longer", "max_model_len": 1024})
            with pytest.raises(ConfigError, match=f"{url} serves sequences of 512 tokens, 1024 are asked for"):
                async with running(longer):
                    pass


@contextlib.asynccontextmanager
async def address(socket: Path) -> AsyncIterator[str]:
    """A port of the loopback that leads to a Unix socket."""

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(str(socket))
        await asyncio.gather(copied(reader, ours), copied(theirs, writer), return_exceptions=True)

    async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        finally:
            target.close()

    door = await asyncio.start_server(through, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{door.sockets[0].getsockname()[1]}"
    finally:
        door.close()


async def test_what_vllm_refuses_is_said(vllm_python: Path, model: Path, tmp_path: Path) -> None:
    for args, words in (
        (
            "--no-such-option",
            r"vllm_args: this vLLM has no option --no-such-option; end of its log:[\s\S]*error: unrec",
        ),
        ("--max-model-len 100000", r"max_model_len: .* is greater than the derived max_model_len"),
    ):
        with pytest.raises(ConfigError, match=words):
            async with running(settings(model, vllm_python, tmp_path / "run", vllm_args=args)):
                pass
