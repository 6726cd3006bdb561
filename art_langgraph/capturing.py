"""What is different in the app's process while rollouts run, as one block: capture, callback, providers, caches.

It refuses to leave anything behind: what it switched is switched back, whatever happened inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from art_backends import capture

from art_langgraph import hook, providers
from art_langgraph.caches import llm_cache_off


@contextmanager
def capturing() -> Iterator[str | None]:
    """Capture for the length of a block; yields what to tell the user of it, if anything."""
    with capture.installed():
        hook.install()
        providers.install()
        try:
            with llm_cache_off() as told:
                yield told
        finally:
            providers.uninstall()
            hook.uninstall()
