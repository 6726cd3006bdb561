"""Our own HTTP clients to the proxy: one per event loop, one per process for synchronous code.

A client that an app built at import is tied to the event loop that first used it and to the proxies of the
environment; the second ``asyncio.run`` with it fails after the server has already answered. So routed requests go
through clients of ours, of the same library as the SDK's request (httpx2 for openai 3, httpx before), so that the
SDK recognises their errors.

It refuses proxies, netrc and certificates of the environment (``trust_env=False``), redirects, and any cap on
connections: how many rollouts run at once is the loop's to say. On plain HTTP (the proxy on this machine) a
connection serves one request: that costs a fraction of a millisecond, leaves nothing open when an event loop closes,
and cannot meet a kept connection that the server has just dropped.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import threading
import weakref
from typing import Any

_Key = tuple[int, str, bool]  # process, library, whether over TLS


def library_of(request: Any) -> Any:
    """The module (httpx or httpx2) that a request, or a subclass of one, comes from; TypeError for anything else."""
    for kind in type(request).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("httpx", "httpx2"):
            return sys.modules[root]
    raise TypeError(f"{type(request).__name__} is neither httpx's nor httpx2's")


class Clients:
    """The clients of this process. Thread-safe; a forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sync: dict[_Key, Any] = {}
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, Any]] = weakref.WeakKeyDictionary()

    def sync(self, library: Any, secure: bool) -> Any:
        key = (os.getpid(), library.__name__, secure)
        with self._lock:
            client = self._sync.get(key)
            if client is None:
                client = self._sync[key] = library.Client(**_options(library, secure))
            return client

    def asynchronous(self, library: Any, secure: bool) -> Any:
        """The client of the running event loop; RuntimeError if none is running."""
        loop = asyncio.get_running_loop()
        key = (os.getpid(), library.__name__, secure)
        with self._lock:
            clients = self._async.setdefault(loop, {})
            client = clients.get(key)
            if client is None:
                client = clients[key] = library.AsyncClient(**_options(library, secure))
            return client

    def close(self) -> None:
        """Close the synchronous clients and forget the others (they hold no idle connection on plain HTTP)."""
        with self._lock:
            for client in self._sync.values():
                client.close()
            self._sync.clear()
            self._async.clear()


def _options(library: Any, secure: bool) -> dict[str, Any]:
    # A context without any authority costs nothing to build and trusts nobody: right where no TLS is spoken.
    context = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    limits = library.Limits(max_connections=None, max_keepalive_connections=None if secure else 0)
    return {"trust_env": False, "follow_redirects": False, "verify": context, "limits": limits}
