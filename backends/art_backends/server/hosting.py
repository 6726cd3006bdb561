"""What answers and what trains, by the setting ``engine``: which children there are, and whom the proxy asks.

- *embedded*: one worker is engine and trainer.
- *vLLM, managed*: a worker without an engine, and vLLM as a second child; both are watched and restarted.
- *vLLM, attached*: a worker without an engine, and servers that run elsewhere: they are watched, never started.

The worker is first in each case: it finds the base model, whose folder, length and chat template vLLM is started with,
and tells its tokenizer, which vLLM does not.

It refuses to decide what is loaded: ``on_return`` is what has to be done when an engine is there again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from art_backends.config import TrainConfig
from art_backends.engines.vllm import command, environment
from art_backends.engines.vllm.said import last_error
from art_backends.errors import ConfigError, EngineError, ServerError, TrainingError
from art_backends.proxy.engine import Engine
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.replicas import Replicas
from art_backends.server import fitting, probe
from art_backends.server.folder import RunFolder
from art_backends.server.supervisor import Supervisor
from art_backends.trajectories import CaptureLevel

log = logging.getLogger(__name__)

TEMPLATE = "chat_template.jinja"  # in the run folder: what vLLM is told, where it is not the model's own
VLLM_START_SECONDS = 1800.0  # large models are read and compiled for minutes
REACH_SECONDS = 30.0  # until a server of the settings must have answered
LOG_CHARACTERS = 100_000  # at the end of vLLM's log, where a cause is looked for: its tracebacks are long
SLEEP_SECONDS = 300.0  # until vLLM must sleep, or be awake again


class Child(Protocol):
    """What is needed of a supervised child; see ``supervisor.Supervisor``."""

    socket: Path
    ready: dict[str, Any]
    on_restart: Callable[[], Awaitable[None]] | None
    healthy: Callable[[], Awaitable[bool]] | None

    async def start(self) -> None: ...
    async def wait_ready(self, deadline: float) -> None: ...
    def state(self) -> dict[str, Any]: ...
    async def stop(self) -> None: ...


MakeWorker = Callable[[TrainConfig, RunFolder], Child]
OnReturn = Callable[[EngineClient | None], Awaitable[None]]
"""What to do when an engine is there again: this one of several, or (None) the one there is."""


class Hosting:
    """The embedded engine; the others differ where they say so. ``start`` before anything else."""

    def __init__(self, config: TrainConfig, folder: RunFolder, make_worker: MakeWorker) -> None:
        self._config = config
        self._folder = folder
        self.worker = make_worker(config, folder)
        self.trainer = self._client(uds=str(self.worker.socket))  # takes the steps, tells the tokenizer
        self.engine: Engine = self.trainer  # answers calls, loads adapters
        self.digest = ""  # of the base model

    async def start(self) -> None:
        """Start the children, one after the other; raises what they say."""
        log.info("loading %s", self._config.base_model)
        await self.worker.start()
        self.digest = str(self.worker.ready.get("digest"))
        self.worker.healthy = self.trainer.healthy

    async def capture(self, model: str) -> tuple[CaptureLevel, bool]:
        """What comes back of a call of the base ``model``, and whether exact prompts are taken."""
        return await probe.capture_level(self.engine, model)

    def on_return(self, hook: OnReturn) -> None:
        """``hook`` is awaited when an engine is there again, before calls are."""
        self.worker.on_restart = partial(hook, None)

    @property
    def answering(self) -> Child:
        """The child that is the engine."""
        return self.worker

    def up(self) -> bool:
        """Whether the engine can be asked now."""
        return bool(self.answering.state()["state"] == "up")

    async def wait_ready(self, deadline: float) -> None:
        """Wait until the engine can be asked; ArtError if it cannot within ``deadline`` seconds."""
        await self.answering.wait_ready(deadline)

    @asynccontextmanager
    async def training(self, calls_wait: Callable[[], AbstractAsyncContextManager[None]]) -> AsyncIterator[None]:
        """While a step trains. ``calls_wait()`` makes new calls wait, once those in flight have ended."""
        yield

    def children(self) -> Sequence[Any]:
        """Those that the status page shows, each with ``state()``."""
        return [self.worker]

    async def aclose(self) -> None:
        """End what was started here."""
        await self.trainer.aclose()
        await self.worker.stop()

    def _client(self, **where: Any) -> EngineClient:
        limits = self._config.limits
        return EngineClient(**where, event_bytes=limits.event_bytes, reply_bytes=limits.reply_bytes)


class Managed(Hosting):
    """A vLLM that is a child of this process, on a socket of its own: its control routes are open to who reaches it."""

    def __init__(self, config: TrainConfig, folder: RunFolder, make_worker: MakeWorker) -> None:
        environment.command(config.vllm)  # says what is missing before the worker has loaded anything
        command.room(config.rank)
        super().__init__(config, folder, make_worker)
        self._log = folder.path / "logs" / "vllm.log"
        self._vllm: Supervisor | None = None
        self._served: EngineClient | None = None

    async def start(self) -> None:
        await super().start()
        ready = self.worker.ready
        template, file = str(ready["chat_template"]), self._folder.path / TEMPLATE
        own = bool(ready["own_template"])
        if not own:
            try:
                file.write_text(template)
            except OSError as error:
                raise ServerError(f"{file}: cannot be written: {error.strerror}") from None
        model = command.Model(Path(ready["model"]), int(ready["max_model_len"]), template, own)
        gpu = environment.has_gpu(self._config.device)
        how = command.start(self._config, model, template_file=file, gpu=gpu)
        words = [sys.executable, "-m", "art_backends.engines.vllm.launcher"]
        words += [f"--set={name}={value}" for name, value in how.variables.items()]
        words += [f"--unset={name}" for name in how.without]
        log.info("starting vLLM, which writes to %s: %s", self._log, " ".join(how.words))
        words += ["--", *how.words]
        child = Supervisor(words, log_file=self._log, name="vLLM", start_deadline=VLLM_START_SECONDS)
        self._vllm = child
        self.engine = self._served = self._client(uds=str(child.socket), tokenizer=self.trainer)
        await child.start()
        child.healthy = self.engine.healthy
        log.info("vLLM answers after %s s", child.ready.get("start_seconds"))

    async def capture(self, model: str) -> tuple[CaptureLevel, bool]:
        try:
            (does,) = (await _able(self.engine, model, "vllm_args")).values()
        except EngineError as error:  # its log knows more: an engine that dies of its first call says so there
            cause = last_error((await asyncio.to_thread(_end_of, self._log)).splitlines())
            raise ServerError(
                f"vLLM started, but did not answer as it must: {error}"
                + (f" ({cause})" if cause else "")
                + f"; {self._log} has the rest"
            ) from None
        return does.capture, does.exact_prompts

    def on_return(self, hook: OnReturn) -> None:
        self.answering.on_restart = partial(hook, None)

    @property
    def answering(self) -> Supervisor:
        assert self._vllm is not None, "start() was not called"
        return self._vllm

    @asynccontextmanager
    async def training(self, calls_wait: Callable[[], AbstractAsyncContextManager[None]]) -> AsyncIterator[None]:
        if not self._config.vllm_sleep:
            yield
            return
        async with calls_wait():
            await self._sleep()
            try:
                yield
            finally:
                await self._wake()

    async def _sleep(self) -> None:
        await self.answering.wait_ready(VLLM_START_SECONDS)
        problem = await self._refuses("/sleep?level=1")
        if problem is not None:
            if not problem.startswith("HTTP 4"):  # it may have begun to
                await self._wake()
            raise TrainingError(f"vLLM did not go to sleep before the step ({problem}): train without vllm_sleep")
        log.info("vLLM sleeps while the step trains")

    async def _wake(self) -> None:
        """Wake it; one that does not wake is replaced by a new one: calls wait for that as after any crash."""
        await self.answering.wait_ready(VLLM_START_SECONDS)  # it may have died meanwhile: the new one is awake
        problem = await self._refuses("/wake_up")
        if problem is not None:
            log.error("vLLM DID NOT WAKE UP after a step (%s): it is killed and started anew", problem)
            await self.answering.replace()

    async def _refuses(self, path: str) -> str | None:
        """Why vLLM does not do what it is told, or None."""
        assert self._served is not None, "start() was not called"
        try:
            async with asyncio.timeout(SLEEP_SECONDS):
                reply = await self._served.post(path, {})
        except TimeoutError:
            return f"no answer within {SLEEP_SECONDS:.0f} s"
        except EngineError as error:
            return str(error)
        return None if reply.status == 200 else f"HTTP {reply.status}: {reply.content[:200].decode(errors='replace')}"

    def children(self) -> Sequence[Any]:
        return [self.worker, *([] if self._vllm is None else [self._vllm])]

    async def aclose(self) -> None:
        await self.engine.aclose()
        # at once: each has some seconds to end in order, and whoever waits for us has not many
        await asyncio.gather(*([] if self._vllm is None else [self._vllm.stop()]), super().aclose())


class Attached(Hosting):
    """vLLM servers that somebody else keeps, on this machine or others: watched, never started or restarted."""

    def __init__(self, config: TrainConfig, folder: RunFolder, make_worker: MakeWorker) -> None:
        super().__init__(config, folder, make_worker)
        self._servers = [self._client(url=url, tokenizer=self.trainer) for url in config.engine_url]
        self._replicas = Replicas(self._servers)
        self.engine = self._replicas
        self._does: tuple[str, probe.Abilities] | None = None  # a server, and what it was found to do

    async def start(self) -> None:
        for server in self._servers:  # before the worker, which reads a model
            await _reached(server)
        await super().start()
        for server in self._servers:
            await fitting.check(server, server.address, self.trainer, self._config)
        await self._replicas.start()

    async def capture(self, model: str) -> tuple[CaptureLevel, bool]:
        found = await _able(self.engine, model, "engine_url")
        self._does = next(iter(found.items()))
        return self._does[1].capture, self._does[1].exact_prompts

    def on_return(self, hook: OnReturn) -> None:
        async def back(server: EngineClient) -> None:
            await self._as_before(server)
            await hook(server)

        self._replicas.on_back = back

    async def _as_before(self, server: EngineClient) -> None:
        """ConfigError if somebody has started another model there, or the same with other flags."""
        if self._does is not None:
            name, does = self._does
            await fitting.check(server, server.address, self.trainer, self._config)
            probe.agree([f"{name} at the start", server.address], [does, await probe.abilities(server, does.model)])

    def up(self) -> bool:
        return self._replicas.up

    async def wait_ready(self, deadline: float) -> None:
        await self._replicas.wait_ready(deadline)

    async def aclose(self) -> None:
        await self._replicas.aclose()
        await super().aclose()


def _end_of(log_file: Path) -> str:
    try:
        return log_file.read_text(errors="replace")[-LOG_CHARACTERS:]
    except OSError:
        return ""


async def _able(engine: Engine, model: str, setting: str) -> dict[str, probe.Abilities]:
    """What each server of an engine does. ConfigError, before any rollout, for what training cannot do without, with
    the option that brings it; what it can do without is logged."""
    servers = engine.servers()
    found = [await probe.abilities(server, model) for server in servers.values()]
    for name, one in zip(servers, found, strict=True):
        if one.fatal:
            raise ConfigError(f"{setting}: {name} cannot be trained with: {'; '.join(one.fatal)}")
        for problem in one.warnings:
            log.warning("%s: %s", name, problem)
    probe.agree(list(servers), found)
    return dict(zip(servers, found, strict=True))


async def _reached(server: EngineClient) -> None:
    """ConfigError if nothing like an engine answers at an address of the settings."""
    where = f"engine_url: {server.address}"
    try:
        async with asyncio.timeout(REACH_SECONDS):
            models = await server.models()
    except TimeoutError:
        raise ConfigError(f"{where} gave no answer within {REACH_SECONDS:.0f} s") from None
    except EngineError as error:
        if error.code == "engine_unreachable":
            raise ConfigError(f"{where} cannot be reached: start vLLM there first, or correct the address") from None
        raise ConfigError(f"{where} is no vLLM server: {error}") from None
    if not models:
        raise ConfigError(f"{where} is no vLLM server: its /v1/models names no model")


def choose(config: TrainConfig, folder: RunFolder, make_worker: MakeWorker | None = None) -> Hosting:
    """The hosting that the settings ask for."""
    kind = Hosting
    if config.engine == "vllm":
        kind = Attached if config.engine_url else Managed
    return kind(config, folder, make_worker or worker)


def worker(config: TrainConfig, folder: RunFolder) -> Supervisor:
    """The worker's process, with an engine in it or not."""
    words = [sys.executable, "-m", "art_backends.worker"]
    options: dict[str, Any] = {
        "--base-model": config.base_model,
        "--name": config.name,
        "--versions": folder.versions,
        "--dtype": config.dtype,
        "--device": config.device,
        "--threads": config.threads,
        "--max-model-len": config.max_model_len,
    }
    if config.chat_template is not None:
        options["--chat-template"] = config.chat_template.expanduser().absolute()
    for option, value in options.items():
        words += [option, str(value)]
    if config.engine != "embedded":
        words += ["--no-engine"]
    if config.vllm_sleep:
        words += ["--release"]
    return Supervisor(words, log_file=folder.path / "logs" / "worker.log", name="worker")
