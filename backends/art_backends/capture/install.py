"""Switch capture on and off for the process.

``install()`` and ``uninstall()`` pair up: with the last ``uninstall()`` the SDK's and threading's attributes are the
original objects again. It refuses to raise for one ``uninstall()`` too many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from art_backends.capture import openai_route, threads
from art_backends.capture.patches import PatchSet

_lock = threading.Lock()
_patches = PatchSet()
_users: list[None] = []  # one entry per install() not yet undone


def install() -> None:
    """Route the openai SDK's requests of code inside a scope, and let threads carry the scope."""
    with _lock:
        if not _users:
            openai_route.install(_patches)
            threads.install(_patches)
        _users.append(None)


def uninstall() -> None:
    """Undo one ``install()``; the last one restores the original objects."""
    with _lock:
        if not _users:
            return
        _users.pop()
        if not _users:
            _patches.restore()
            openai_route.CLIENTS.close()


def is_installed() -> bool:
    return bool(_users)


@contextmanager
def installed() -> Iterator[None]:
    """Capture for the length of a block."""
    install()
    try:
        yield
    finally:
        uninstall()
