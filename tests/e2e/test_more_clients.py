"""Clients that want an environment of their own: the scripts of tests/clients, each with its own parser and validators.

``make clients`` sets up that environment (and the npm packages, where there is Node).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
MADE = ROOT / ".venv" / "clients"
PYTHON = MADE / "bin" / "python"
MODULES = MADE / "node_modules"
OLDER = sorted(path.name.removeprefix("openai-") for path in MADE.glob("openai-*"))


def run(command: list[str], folder: Path, served: Any, **more: str) -> list[dict[str, Any]]:
    """What a script says it tried; its own words if it failed."""
    project, url = served
    key = (project.run / "agent.token").read_text().strip()
    environment = project.environment(
        OPENAI_BASE_URL=f"{url}/v1",
        OPENAI_API_KEY=key,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY=key,
        NO_PROXY="127.0.0.1",
        **more,
    )
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.skipif(not PYTHON.exists(), reason="make clients has not been run")
@pytest.mark.parametrize(
    ("script", "tried"), [("openai_agents_client.py", 8), ("pydantic_agents.py", 6), ("litellm_client.py", 8)]
)
def test_python_clients(served: Any, script: str, tried: int) -> None:
    found = run([str(PYTHON), str(CLIENTS / script)], CLIENTS, served)
    assert len(found) == tried
    assert all(item["right"] for item in found)


@pytest.mark.skipif(not OLDER, reason="make clients has not been run")
@pytest.mark.parametrize("version", OLDER or ["none"])
def test_older_openai_sdks(served: Any, version: str) -> None:
    script = [str(PYTHON), str(CLIENTS / "openai_client.py")]
    found = run(script, CLIENTS, served, PYTHONPATH=str(MADE / f"openai-{version}"))
    assert len(found) == 11
    assert found[-1] == {"what": f"openai {version}", "right": True}


@pytest.mark.skipif(shutil.which("node") is None or not MODULES.exists(), reason="make clients found no Node")
@pytest.mark.parametrize(("script", "tried"), [("openai.mjs", 10), ("anthropic.mjs", 6), ("vercel.mjs", 9)])
def test_javascript_clients(served: Any, script: str, tried: int) -> None:
    for file in (script, "common.mjs"):  # a script finds its packages beside itself
        shutil.copy(CLIENTS / file, MADE / file)
    found = run(["node", script], MADE, served)
    assert len(found) == tried
    assert all(item["right"] for item in found)
