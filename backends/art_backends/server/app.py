"""The server's app: the guard, the control API, and the proxy's doors. Nothing else is reachable.

It refuses to hold logic: routes are ``control``'s and the proxy's, admission is ``auth``'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from art_backends.errors import ArtError, EngineError
from art_backends.proxy.app import Proxy
from art_backends.proxy.doors import Door
from art_backends.proxy.observing import CONTENT_TYPE
from art_backends.server.auth import METRICS, Guard, HostRules, error
from art_backends.server.control import Control, Services

RESTART_SECONDS = 120.0  # that a call waits for an engine which is being restarted
RESTART_CALLS = 1024  # calls that may wait for it


def build(
    services: Services,
    proxy: Proxy,
    hosts: HostRules,
    *,
    engine_up: Callable[[], bool],
    wait_for_engine: Callable[[float], Awaitable[None]],
) -> ASGIApp:
    """The ASGI app. ``engine_up`` says whether the engine has its adapters: else calls wait until it does.

    ``wait_for_engine(seconds)`` raises ArtError if it is not up by then. A restart takes longer than an SDK retries:
    calls that were refused meanwhile would cost an agent its run.
    """
    waiting = 0

    async def ready() -> None:
        nonlocal waiting
        if engine_up():
            return
        problem = f"{waiting} calls are waiting for the engine"
        if waiting < RESTART_CALLS:
            waiting += 1
            try:
                await wait_for_engine(RESTART_SECONDS)
                return
            except ArtError as failure:
                problem = str(failure).partition("; ")[0]  # without the log's tail, which is not the app's to read
            finally:
                waiting -= 1
        raise EngineError(f"the engine is being restarted; try again ({problem})", 503, "engine_restarting")

    proxy.ready = ready

    def through(door: Door) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await door.answer(request, request.state.identity)

        return answer

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(proxy.metrics(), media_type=CONTENT_TYPE)

    application = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route(METRICS, metrics, methods=["GET"]),
            *(Route(door.path, through(door), methods=[door.method]) for door in proxy.doors.all),
            *Control(services).routes(),
        ],
        exception_handlers={HTTPException: _refused},
    )
    application.router.redirect_slashes = False
    return Guard(application, services.sessions, hosts, proxy.doors)


async def _refused(_: Request, problem: Exception) -> Response:
    """What the router refuses (no such route, wrong method), in the one error envelope."""
    assert isinstance(problem, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(problem.status_code, "error")
    return error(problem.status_code, code, problem.detail, dict(problem.headers or {}))
