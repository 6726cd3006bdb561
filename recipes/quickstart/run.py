"""The main job: measure the agent, train it in place, measure it again.

    make demo

Stop it with Ctrl-C whenever you like: the same command goes on from the last committed version.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "not-needed-while-training")  # ChatOpenAI wants one when it is made
sys.path.insert(0, str(Path(__file__).parent))

from app import graph
from art_backends.errors import ArtError
from reward import score
from scenarios import make
from settings import SETTINGS

import art_langgraph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".art/quickstart"), help="run folder")
    parser.add_argument("--steps", type=int, default=40, help="training steps at most (default: 40)")
    parser.add_argument("--held-out", type=int, default=60, help="held-out questions (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--engine", choices=["embedded", "vllm"], help="what answers (default: embedded)")
    parser.add_argument("--engine-url", help="addresses of vLLM servers that run already, with commas between them")
    parser.add_argument("--vllm", help="interpreter or command of vLLM (default: of `art-backends vllm install`)")
    options = parser.parse_args()
    engine = {name: getattr(options, name) for name in ("engine", "engine_url", "vllm") if getattr(options, name)}
    try:
        report = art_langgraph.train(
            graph,
            scenarios=make(600, held_out=False, seed=options.seed),
            held_out=make(options.held_out, held_out=True),
            reward=score,
            folder=options.folder,
            steps=options.steps,
            seed=options.seed,
            **SETTINGS,
            **engine,
        )
    except ArtError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    show(report, options.folder)
    return 0


def show(report: art_langgraph.Report, folder: Path) -> None:
    """Before and after, and how to serve the result."""
    for example in report.examples[:3]:
        print(f"\nQ  {example.scenario['messages'][0]['content']}   (right: {example.scenario['answer']})")
        print(f"   before: {said(example.before)}")
        print(f"   after:  {said(example.after)}")
    low, high = report.confidence_interval or (0.0, 0.0)
    print(f"\nheld-out success: {report.base_success:.0%} before, {report.trained_success:.0%} after", end=" ")
    print(f"(95 % interval {low:.0%} to {high:.0%}), {report.steps} steps in {report.train_seconds / 60:.1f} minutes")
    print(f"report: {folder}/report.json, curves: {folder}/curves.png")
    print("\nServe it, and ask the unmodified app:")
    print(f"  .venv/bin/art-backends serve --folder {folder}")
    print(
        f"  OPENAI_BASE_URL=http://127.0.0.1:8787/v1 OPENAI_API_KEY=$(cat {folder}/agent.token) "
        '.venv/bin/python recipes/quickstart/app.py "When does order 4417 arrive?"'
    )


def said(output: dict | None) -> str:
    """One run of the agent in a line."""
    parts = []
    for message in (output or {}).get("messages", [])[1:]:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        parts += [f"{call['name']}({call['arguments']})" for call in calls]
        if message.get("content"):
            parts.append(str(message["content"]).replace("\n", " ")[:120])
    return " → ".join(parts) or "(no answer)"


if __name__ == "__main__":
    raise SystemExit(main())
