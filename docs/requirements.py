"""Writes what is shown to work, the end of a page, from a manifest of requirements: ``python docs/requirements.py``.

The rest of each page is written by hand. It refuses to promise what no test shows.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEADING = "## What is shown to work\n"
MANIFESTS = {  # by page
    "docs/langgraph.md": "tests/art_langgraph/requirements.toml",
    "docs/proxy.md": "tests/backends/proxy/requirements.toml",
}


def page(name: str) -> str:
    """The whole page as it should be."""
    by_hand, _, _ = (ROOT / name).read_text(encoding="utf-8").partition(HEADING)
    source = MANIFESTS[name]
    manifest = tomllib.loads((ROOT / source).read_text(encoding="utf-8"))
    said = (
        "Each row is held by tests; the names are those of functions below `tests/`. From here on, the page is\n"
        f"written by `python docs/requirements.py` from `{source}`; do not edit it by hand.\n"
    )
    return f"{by_hand.rstrip()}\n\n{HEADING}\n{said}" + "".join(_section(section) for section in manifest["section"])


def _section(section: dict[str, Any]) -> str:
    rows = "".join(f"| {row['says']} | {_tests(row['tests'])} |\n" for row in section["row"])
    return f"\n### {section['name']}\n\n| what | shown by |\n|---|---|\n{rows}"


def _tests(names: list[str]) -> str:
    return ", ".join(
        f"[{name.partition('::')[2].removeprefix('test_')}](../tests/{name.partition('::')[0]})" for name in names
    )


if __name__ == "__main__":
    for each in MANIFESTS:
        (ROOT / each).write_text(page(each), encoding="utf-8")
