"""An app whose client wants a key when it is made is trained from a shell that has none."""

import os
import subprocess
import sys
from pathlib import Path

APP = """
import sys
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4o-mini")
sys.exit("the app was loaded")
"""


def test_the_command_line_needs_no_key(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    (tmp_path / "rewards.py").write_text("def score(run):\n    return 1.0\n")
    command = [sys.executable, "-m", "art_langgraph.cli", "train", "app:graph", "--scenarios", "tasks.jsonl"]
    command += ["--reward", "rewards:score", "--folder", str(tmp_path / "run")]
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path, env=environment
    )
    assert "the app was loaded" in done.stderr
    assert "api_key" not in done.stderr
