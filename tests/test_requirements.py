"""The manifest of what is promised of LangGraph apps: each row has tests that exist, each test of its suites a row."""

from __future__ import annotations

import ast
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANIFEST = tomllib.loads((ROOT / "tests/art_langgraph/requirements.toml").read_text(encoding="utf-8"))
ROWS = [row for section in MANIFEST["section"] for row in section["row"]]


def names_in(path: str) -> set[str]:
    """Names of the test functions of a file below the repository's root."""
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_each_row_has_tests_and_they_exist() -> None:
    missing = []
    for row in ROWS:
        assert row["says"]
        assert row["tests"], f"{row['says']}: no test"
        for name in row["tests"]:
            path, _, function = name.partition("::")
            if function not in names_in(f"tests/{path}"):
                missing.append(name)
    assert not missing


def test_each_test_of_the_suites_shows_a_row() -> None:
    shown = {f"tests/{name}" for row in ROWS for name in row["tests"]}
    alone = [f"{path}::{name}" for path in MANIFEST["suites"] for name in sorted(names_in(path))]
    assert [name for name in alone if name not in shown] == []


def test_no_promise_is_made_twice() -> None:
    says = [row["says"] for row in ROWS]
    assert len(says) == len(set(says))


def test_the_page_is_written_from_it() -> None:
    module = runpy.run_path(str(ROOT / "docs/langgraph.py"))
    assert (ROOT / "docs/langgraph.md").read_text(encoding="utf-8") == module["page"](), "run: python docs/langgraph.py"
