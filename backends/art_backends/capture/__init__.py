"""Capture in the agent's process: which rollout a model call belongs to, and its way to the proxy.

``with rollout_scope(base_url, token, rollout_id):`` around a run of the agent, ``install()`` once before it: every
request that the openai SDK makes inside the scope goes to the proxy with the rollout's token, from any task, thread
or executor that the agent starts. Outside a scope nothing changes at all; ``uninstall()`` restores the original
objects.

It refuses to change what the agent sees, to let the user's key near the proxy, and to raise into the agent: what
cannot be captured is counted (``Scope.counts``) and goes where it always went.
"""

from art_backends.capture.install import install, installed, is_installed, uninstall
from art_backends.capture.openai_route import provider_of
from art_backends.capture.scope import (
    NodeContext,
    Scope,
    current_node,
    current_scope,
    find_scope,
    open_scope,
    outside_requests,
    rollout_scope,
)

__all__ = [
    "NodeContext",
    "Scope",
    "current_node",
    "current_scope",
    "find_scope",
    "install",
    "installed",
    "is_installed",
    "open_scope",
    "outside_requests",
    "provider_of",
    "rollout_scope",
    "uninstall",
]
