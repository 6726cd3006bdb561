"""The servers of `tests/backends/capture`, and capture with the LangChain hook."""

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[1] / "backends" / "capture" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("capture_servers", _PATH)
_SERVERS = importlib.util.module_from_spec(_SPEC)
sys.modules["capture_servers"] = _SERVERS
_SPEC.loader.exec_module(_SERVERS)

proxy = _SERVERS.proxy
provider = _SERVERS.provider


@pytest.fixture
def hooked():
    """Capture is on: the route, the threads and the hook."""
    from art_langgraph import hook
    from art_langgraph.capturing import capturing

    errors = hook.HOOK.errors
    with capturing():
        yield hook.HOOK
    assert hook.HOOK.errors == errors
    assert not hook.HOOK._runs
