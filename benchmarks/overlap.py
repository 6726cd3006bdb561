"""Does playing the next step while this one trains pay? The same run twice: one thing after the other, and overlapped.

    python benchmarks/overlap.py [--json FILE] [--quick] [--steps 8] [--tool-seconds 30] [--repeats 3] [--staleness 1]

The agent asks the model, waits ``--tool-seconds`` for a tool, as for a search or a test suite, and asks again; each
answer has the same number of tokens. Its reward is a checksum of what it said: every group has a spread of rewards, so
every step plays and trains as much as any other, and what is compared is time alone.

Each repeat is both runs, in fresh folders, in turn; compared are the seconds of all steps together (rollouts, training
and swap; not the start of the server). The overlapped run makes the same steps from as many rollouts, which are up to
``--staleness`` versions old when they are trained.

``--quick`` is one repeat of three steps. It refuses to say what staleness costs in learning: see learning.py for that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import zlib
from pathlib import Path
from typing import Any

from art_backends.rewards.values import Run
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

import art_langgraph

os.environ.setdefault("OPENAI_API_KEY", "not-needed-while-training")
TOKENS = 24  # of each answer
SETTINGS = {"models": ["gpt-4o-mini"], "groups_per_step": 2, "group_size": 4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="one repeat, 3 steps")
    parser.add_argument("--steps", type=int, default=8, help="training steps of a run (default: 8)")
    parser.add_argument("--tool-seconds", type=float, default=30.0, help="what a tool takes (default: 30)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--staleness", type=int, default=1, help="max_staleness of the overlapped run (default: 1)")
    options = parser.parse_args()
    steps, repeats = (3, 1) if options.quick else (options.steps, options.repeats)
    graph = agent(options.tool_seconds)
    pairs = []
    for repeat in range(repeats):
        pair = {
            "synchronous": run(graph, steps, repeat),
            "overlapped": run(graph, steps, repeat, overlap=True, max_staleness=options.staleness),
        }
        pair["speedup"] = pair["synchronous"]["seconds"] / pair["overlapped"]["seconds"]
        pairs.append(pair)
        print(
            f"{steps} steps: {pair['synchronous']['seconds']:.1f} s one after the other, "
            f"{pair['overlapped']['seconds']:.1f} s overlapped: {pair['speedup']:.2f} ×",
            flush=True,
        )
    speedups = [pair["speedup"] for pair in pairs]
    print(f"median {statistics.median(speedups):.2f} × ({min(speedups):.2f} to {max(speedups):.2f})")
    if options.json is not None:
        plan = {"steps": steps, "tool_seconds": options.tool_seconds, "staleness": options.staleness, **SETTINGS}
        result = {"plan": plan, "pairs": pairs, "speedup_vs_synchronous": statistics.median(speedups)}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def agent(tool_seconds: float) -> Any:
    """Asks, waits for a tool, asks again."""
    model = ChatOpenAI(model="gpt-4o-mini", max_completion_tokens=TOKENS, extra_body={"ignore_eos": True})

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def tool(state: MessagesState) -> dict[str, Any]:
        await asyncio.sleep(tool_seconds)
        return {"messages": [HumanMessage("The tool found: seven pieces, in the second hall. Go on.")]}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.add_node("tool", tool)
    builder.add_node("answer", ask)
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "tool")
    builder.add_edge("tool", "answer")
    builder.add_edge("answer", END)
    return builder.compile()


def score(run: Run) -> float:
    """A checksum of what was said: it differs wherever answers do."""
    said = "".join(message["content"] for message in run.output["messages"] if message["role"] == "assistant")
    return zlib.crc32(said.encode()) / 2**32


def run(graph: Any, steps: int, seed: int, **settings: Any) -> dict[str, Any]:
    """One run in a fresh folder: its seconds, and the rows of its steps."""
    asked = [{"messages": [{"role": "user", "content": f"Tell me where part {number} lies."}]} for number in range(100)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = {**SETTINGS, "folder": folder, "steps": steps, "seed": seed, **settings}
        art_langgraph.train(graph, scenarios=asked, reward=score, config=values)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = "step", "outcome", "seconds", "rollout_seconds", "train_seconds", "staleness/max", "rollouts"
    rows = [{key: row.get(key) for key in names} for row in map(json.loads, lines) if "step" in row]
    return {"seconds": sum(row["seconds"] for row in rows), "steps": rows}


if __name__ == "__main__":
    raise SystemExit(main())
