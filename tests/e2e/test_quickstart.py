"""The quickstart's recipe on its real model: one step, exact in every token."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_step_of_the_quickstart_is_exact(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, str(ROOT / "recipes" / "quickstart" / "run.py"), "--folder", str(folder)]
    command += ["--steps", "1", "--held-out", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == 1
    assert report["version"] == "quickstart@1"
    assert report["faults"] == 0
    assert report["drifted_calls"] == 0
    assert report["trained_tokens"] > 0
    assert report["mean_abs_logprob_difference"] <= 1e-4
    assert report["max_abs_logprob_difference"] <= 1e-3
    assert report["computed_to_unique_tokens"] >= 1.0
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out success" in done.stdout
    assert "art-backends serve" in done.stdout
