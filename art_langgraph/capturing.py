"""What is different in the app's process while rollouts run, as one block: capture, callback, providers, caches.

It refuses to leave anything behind: what it switched is switched back, whatever happened inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from art_backends import capture

from art_langgraph import hook, providers
from art_langgraph.caches import llm_cache_off

KEY = "OPENAI_API_KEY"


@contextmanager
def placeholder_key() -> Iterator[None]:
    """For the length of a block a key stands in the environment where there is none.

    A client refuses to be made without one. Inside a rollout it is not used; a provider would refuse it.
    """
    if KEY in os.environ:
        yield
        return
    os.environ[KEY] = "no-key-was-set"
    try:
        yield
    finally:
        os.environ.pop(KEY, None)


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
