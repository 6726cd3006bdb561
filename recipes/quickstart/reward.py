"""The reward: a tool was called, the right one, with the right argument, and the answer holds what it returned."""

import json
import re
from typing import Any

from art_backends.rewards.values import Run


def score(run: Run) -> dict[str, float]:
    """Reward in 0 to 1 with its parts; success is 1 when everything was right and nothing was superfluous."""
    scenario: dict[str, Any] = run.scenario
    messages = (run.output or {}).get("messages", [])
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    first = calls[0]["function"] if calls else {}
    called = bool(calls)
    tool = called and first["name"] == scenario["tool"]
    wanted = next(iter(scenario["arguments"].values()))
    argument = tool and _same(first.get("arguments", ""), scenario["arguments"])
    final = messages[-1] if messages else {}
    text = str(final.get("content") or "") if final.get("role") == "assistant" else ""
    answered = argument and not run.error and _holds(text, scenario["answer"], wanted)
    success = bool(answered and len(calls) == 1)
    reward = 0.1 * called + 0.15 * bool(tool) + 0.25 * bool(argument) + 0.3 * bool(answered) + 0.2 * success
    return {"reward": reward, "called": called, "tool": bool(tool), "argument": bool(argument), "success": success}


def _same(arguments: str, wanted: dict[str, str]) -> bool:
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return False
    if not isinstance(given, dict) or set(given) != set(wanted):
        return False
    return all(str(given[name]).strip().lstrip("#").lower() == value.lower() for name, value in wanted.items())


def _holds(text: str, answer: str, key: str) -> bool:
    """The answer stands in the text as a word of its own (47 is not in 1470), not merely inside the key."""
    rest = text.replace(key, "")
    return re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", rest) is not None
