"""Writes docs/langgraph.md from tests/art_langgraph/requirements.toml: ``python docs/langgraph.py``.

It refuses to promise what no test shows.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
MANIFEST = Path(__file__).parents[1] / "tests/art_langgraph/requirements.toml"

HEAD = """# LangGraph apps

Written by `python docs/langgraph.py` from `tests/art_langgraph/requirements.toml`; do not edit it by hand.

An app is captured as it is. Two things are added to its process while rollouts run: the openai SDK's requests go to the
proxy where a rollout's scope is set (see [architecture.md](architecture.md)), and a LangChain callback says which node
and run a request comes from. Chat models of other providers hand their calls to the same way.

```sh
art-langgraph inspect my_app:graph                                # models and where their calls would go; nothing runs
art-langgraph check my_app:graph --scenarios tasks.jsonl          # one scenario: its calls, and what would train
```

## Which calls train

Every call of the policy, but for those of which something is known against it. `art-langgraph check` and
`art-backends rollouts show ID` give the reason in a word:

| word | the call |
|---|---|
| `retry` | was sent again by the SDK; the later one counts |
| `rerun` | came from a run of a node whose result was thrown away: a retry policy or a resumed interrupt ran it again |
| `error`, `cancelled`, `abort` | got no whole answer |
| `rollout_closed` | came after the rollout had ended |
| `redacted` | has a secret in it and is kept without its token ids ([privacy.md](privacy.md)) |
| `constrained` | was sampled under a grammar: its probabilities are not the model's own |
| `other_node` | is not of a node or agent in `nodes` |
| `greedy`, `truncated_sampling` | was not sampled from the whole distribution |
| `capture` | came from an engine that gives no token ids or logprobs |

Two calls with the same prompt are two samples: self-consistency and `Send` do that on purpose.

A node within a retried one that has no checkpointer is given new tasks by LangGraph; calls of the first attempt are
then not known to be void, and train.

## Interrupts

A graph with a checkpointer that interrupts itself is resumed with the next item of the scenario's `resume` list, or
with what `on_interrupt(scenario, values)` returns; it is one rollout. Without an answer the run ends there, and the
reward sees the state with its `__interrupt__`.

## What is shown to work

Each row is held by tests; the names are those of functions below `tests/`.
"""


def page() -> str:
    """The whole page."""
    manifest = tomllib.loads(MANIFEST.read_text(encoding="utf-8"))
    return HEAD + "".join(_section(section) for section in manifest["section"])


def _section(section: dict[str, Any]) -> str:
    rows = "".join(f"| {row['says']} | {_tests(row['tests'])} |\n" for row in section["row"])
    return f"\n### {section['name']}\n\n| what | shown by |\n|---|---|\n{rows}"


def _tests(names: list[str]) -> str:
    return ", ".join(
        f"[{name.partition('::')[2].removeprefix('test_')}](../tests/{name.partition('::')[0]})" for name in names
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
