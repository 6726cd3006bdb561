"""The manifests of what is promised: each row has tests that exist, each test of a manifest's suites shows a row."""

from __future__ import annotations

import ast
import runpy
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WRITER = runpy.run_path(str(ROOT / "docs/requirements.py"))
PAGES: dict[str, str] = WRITER["MANIFESTS"]

each = pytest.mark.parametrize("name", PAGES.values())


def manifest(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


def rows_of(name: str) -> list[dict[str, Any]]:
    return [row for section in manifest(name)["section"] for row in section["row"]]


@cache
def names_in(path: str) -> set[str]:
    """Names of the test functions of a file below the repository's root."""
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@each
def test_each_row_has_tests_and_they_exist(name: str) -> None:
    missing = []
    for row in rows_of(name):
        assert row["says"]
        assert row["tests"], f"{row['says']}: no test"
        for test in row["tests"]:
            path, _, function = test.partition("::")
            if function not in names_in(f"tests/{path}"):
                missing.append(test)
    assert not missing


@each
def test_each_test_of_the_suites_shows_a_row(name: str) -> None:
    shown = {f"tests/{test}" for row in rows_of(name) for test in row["tests"]}
    alone = [f"{path}::{test}" for path in manifest(name)["suites"] for test in sorted(names_in(path))]
    assert [test for test in alone if test not in shown] == []


@each
def test_no_promise_is_made_twice(name: str) -> None:
    says = [row["says"] for row in rows_of(name)]
    assert len(says) == len(set(says))


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_written_from_it(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == WRITER["page"](page), "run: python docs/requirements.py"
