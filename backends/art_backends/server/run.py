"""Starts the server on a run folder, serves until told to stop, and stops in order.

Start: see that nobody holds the folder, bind the address, lock the folder, start the children, check that folder and
settings fit, reconcile, probe, serve, announce. Stop (SIGTERM, SIGINT, or the parent's end): take no new calls, let
those in flight finish within a deadline, end the step in the making (it is made again), close store and worker.

It refuses an address that other machines can reach unless that is asked for in so many words.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import logging.handlers
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from art_backends.child import when_input_ends
from art_backends.config import TrainConfig
from art_backends.errors import AdapterError, ConfigError, EngineError, ServerError, StoreError
from art_backends.proxy.app import Proxy
from art_backends.proxy.engine import Engine
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.identity import Identity
from art_backends.proxy.providers import Providers
from art_backends.redaction import Redactor, guard_logs
from art_backends.server import app, origin, probe, probe_reasoning, probe_sampling
from art_backends.server.adapters import Adapters
from art_backends.server.auth import HostRules, is_loopback
from art_backends.server.control import Services
from art_backends.server.folder import PolicyFile, RunFolder, read_pin
from art_backends.server.holder import held_by
from art_backends.server.hosting import MakeWorker, choose
from art_backends.server.policy import PolicyTable
from art_backends.server.reconcile import reconcile
from art_backends.server.retention import Retention
from art_backends.server.sessions import Sessions, digest
from art_backends.server.steps import Steps
from art_backends.server.traffic import Traffic
from art_backends.store import AsyncStore
from art_backends.trajectories import CaptureLevel

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
HOUSEKEEPING_SECONDS = 5.0
LOG_BYTES = 10 * 1024 * 1024  # of server.log, then it is kept once as server.log.1


async def serve(
    config: TrainConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_remote: bool = False,
    exit_with_parent: bool = False,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    make_worker: MakeWorker | None = None,
    rollout_ttl: float | None = None,
    drain_seconds: float = DRAIN_SECONDS,
) -> None:
    """Serve ``config.folder`` until a signal, ``stop``, or (``exit_with_parent``) the end of standard input.

    ``on_ready`` gets the URL when requests are answered. Raises ConfigError (address, settings that do not fit the
    folder), FolderInUseError, StoreError, ServerError (port taken), and what the worker's start reports.
    """
    held = held_by(config.folder)
    if held is not None:  # said before a taken port, which is likely to be that server's
        raise held.refusal(config.folder.expanduser().absolute())
    listener = _bind(host, port, allow_remote=allow_remote, write_seconds=config.limits.write_seconds)
    stopping = stop or asyncio.Event()
    with (
        contextlib.closing(listener),
        _folder(config.folder) as folder,
        _logged(folder.path / "logs" / "server.log"),
        _told_to_stop(stopping, exit_with_parent),
    ):
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}"
        async with _parts(
            config, folder, host=host, url=url, make_worker=make_worker, rollout_ttl=rollout_ttl
        ) as parts:
            server = _Server(
                uvicorn.Config(
                    parts.asgi,
                    http="httptools",
                    lifespan="off",
                    access_log=False,  # its lines would hold the tokens that stand in paths
                    log_config=None,
                    server_header=False,
                    proxy_headers=False,
                    timeout_keep_alive=60,
                    timeout_graceful_shutdown=max(1, int(drain_seconds)),
                )
            )
            running = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            keeping = asyncio.create_task(_housekeeping(parts), name="housekeeping")
            try:
                await asyncio.to_thread(folder.announce, url)
                log.info("serving %s at %s", folder.path, url)
                if on_ready is not None:
                    on_ready(url)
                waiting = asyncio.create_task(stopping.wait())
                await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            finally:
                log.info("stopping: calls in flight have %.0f s", drain_seconds)
                keeping.cancel()
                parts.services.steps.stop_waiting()
                server.should_exit = True  # no new connection from here on
                if not await parts.proxy.drain(drain_seconds):
                    log.warning("calls were still in flight after %.0f s: ended", drain_seconds)
                await asyncio.wait((running, keeping))
            running.result()  # whatever ended it, if it was not us


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are handled here, in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Parts:
    """What a running server is made of."""

    def __init__(self, services: Services, proxy: Proxy, adapters: Adapters, traffic: Traffic, asgi: Any) -> None:
        self.services = services
        self.proxy = proxy
        self.adapters = adapters
        self.traffic = traffic
        self.asgi = asgi


@contextlib.asynccontextmanager
async def _parts(
    config: TrainConfig,
    folder: RunFolder,
    *,
    host: str,
    url: str,
    make_worker: MakeWorker | None,
    rollout_ttl: float | None,
) -> AsyncIterator[_Parts]:
    started = time.time()
    policy_file = PolicyFile.read(folder.path)
    if policy_file is not None:
        policy_file.check(config)  # before the worker, which takes seconds to start
    origin.check(config, folder.versions)
    async with contextlib.AsyncExitStack() as stack:
        redactor = Redactor(config.privacy)
        guard_logs(redactor)
        store = await AsyncStore.open(folder.store, redactor)
        stack.push_async_callback(store.aclose)
        hosting = choose(config, folder, make_worker)
        stack.push_async_callback(hosting.aclose)
        await hosting.start()
        model_digest, engine = hosting.digest, hosting.engine
        origin.check(config, folder.versions, model_digest)  # before the folder is bound to these settings
        if policy_file is None:
            policy_file = PolicyFile.create(folder.path, config, model_digest)
        policy_file.check(config, model_digest)
        limits = config.limits
        policies = PolicyTable(config.name, base_model=await probe.base_id(engine), models=config.models)
        policies.capture, policies.exact_prompts = await hosting.capture(policies.base_id)
        if policies.capture is not CaptureLevel.TOKENS:
            log.warning("the engine gives %s only: calls are served, none can be trained", policies.capture)
        adapters = Adapters(engine, policies, folder.versions)
        await asyncio.to_thread(origin.place, config, folder.versions, model_digest)
        await reconcile(
            store=store,
            policies=policies,
            adapters=adapters,
            versions=folder.versions,
            digest=model_digest,
            started=started,
            pinned=read_pin(folder.path),
        )
        sessions = Sessions(store, policies, adapters, config, ttl=rollout_ttl)
        await _fixed_tokens(folder, store, sessions)
        providers = Providers(config.providers)
        stack.push_async_callback(providers.aclose)
        proxy = Proxy(
            engine,
            store,
            policy=policies,
            limits=limits,
            providers=providers,
            **await _own_ways(config, engine, policies.base_id),
        )
        sessions.on_closed = proxy.forget
        steps = Steps(
            store=store,
            policies=policies,
            adapters=adapters,
            engine=engine,
            engine_child=hosting,
            trainer=hosting.trainer,
            worker=hosting.worker,
            versions=folder.versions,
            training=lambda: hosting.training(proxy.closed),
        )
        stack.push_async_callback(steps.aclose)
        traffic = _traffic(config, store, policies, proxy)
        stack.push_async_callback(traffic.close_all)

        async def restarted(server: EngineClient | None) -> None:
            proxy.engine_changed()
            try:
                await adapters.reload(server)
            except (AdapterError, EngineError) as error:
                raise ServerError(f"the restarted engine does not serve the adapter: {error}") from error

        hosting.on_return(restarted)
        services = Services(
            store=store,
            policies=policies,
            sessions=sessions,
            steps=steps,
            retention=Retention(
                store,
                sessions,
                traffic,
                folder.path,
                keep_days=config.privacy.keep_days,
                forget_calls=proxy.forget,
            ),
            engine=engine,
            children=hosting.children(),
            policy_file=policy_file,
            counters=proxy.snapshot,
            url=url,
            started=started,
        )
        asgi = app.build(
            services,
            proxy,
            HostRules(host),
            engine_up=hosting.up,
            wait_for_engine=hosting.wait_ready,
        )
        yield _Parts(services, proxy, adapters, traffic, asgi)


async def _own_ways(config: TrainConfig, engine: Engine, model: str) -> dict[str, Any]:
    """What the proxy has to know of vLLM that the embedded engine does not do."""
    if config.engine != "vllm":
        return {}
    return {
        "defaults": await probe_sampling.defaults(engine, model),
        "keep_reasoning": await probe_reasoning.may_be_kept(engine, model),
        "tools_by_grammar": True,
    }


def _traffic(config: TrainConfig, store: AsyncStore, policies: PolicyTable, proxy: Proxy) -> Traffic:
    traffic = Traffic(store, policies, config.privacy)
    traffic.on_closed = proxy.forget
    proxy.keep = traffic.context
    return traffic


async def _fixed_tokens(folder: RunFolder, store: AsyncStore, sessions: Sessions) -> None:
    admin = digest(await asyncio.to_thread(folder.token, "admin"))
    agent = digest(await asyncio.to_thread(folder.token, "agent"))
    sessions.add_fixed(admin, Identity("admin"))
    sessions.add_fixed(agent, Identity("agent"))
    try:
        await store.drop_tokens("admin", keep=[admin])
        await store.drop_tokens("agent", keep=[agent])
        await store.add_token("admin", admin)
        await store.add_token("agent", agent)
    except StoreError as error:
        log.error("the tokens' digests could not be recorded: %s", error)


async def _housekeeping(parts: _Parts) -> None:
    """Unload versions that nobody needs, close rollouts whose time is over, delete what is too old."""
    changed = parts.services.policies.changed
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOUSEKEEPING_SECONDS):
                await changed.wait()
        changed.clear()
        try:
            await parts.adapters.unload_idle()
            await parts.services.sessions.expire()
            await parts.traffic.close_idle()
            await parts.services.retention.expire()
        except Exception:  # boundary: housekeeping goes on whatever one round met
            log.exception("housekeeping failed; it is tried again in %.0f s", HOUSEKEEPING_SECONDS)


def _bind(host: str, port: int, *, allow_remote: bool, write_seconds: float) -> socket.socket:
    if not allow_remote and not is_loopback(host):
        raise ConfigError(
            f"host: {host} can be reached by other machines; add --allow-remote if that is meant "
            "(every request needs a token, but the traffic is not encrypted)"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host: {host} is no address of this machine: {error}") from None
    # asyncio turns Nagle's algorithm off for sockets that say that they are TCP alone; with it, an answer in two parts
    # (head and body) waits 40 ms for the client's acknowledgement
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # a client that was given up may never take what lies in its connection's buffers
            milliseconds = max(1, min(2**31 - 1, int(write_seconds * 1000)))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServerError(
                f"port {port} on {host} is taken by another program; give another one (--port), or --port 0 for any"
            ) from None
        raise ServerError(f"{host}:{port} cannot be bound: {error.strerror}") from None
    return listener


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.acquire(path)
    try:
        yield folder
    finally:
        folder.release()


@contextlib.contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Log to the run folder too, unless standard error is that file already (the starter redirected it)."""
    redirected = False
    with contextlib.suppress(OSError):  # no such file yet, or no standard error
        there, here = file.stat(), os.fstat(2)
        redirected = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
    if redirected:
        yield
        return
    handler = logging.handlers.RotatingFileHandler(file, maxBytes=LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("art_backends")
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _told_to_stop(stop: asyncio.Event, exit_with_parent: bool) -> Iterator[None]:
    """Set ``stop`` on SIGTERM and SIGINT, and when standard input ends if that is asked for."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    if exit_with_parent:
        when_input_ends(loop, stop.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
