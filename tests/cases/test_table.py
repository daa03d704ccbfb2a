"""The table of the cases names tests that are there."""

import ast
import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = {
    cells[1].strip(): cells[3]
    for cells in (line.split("|") for line in (HERE / "README.md").read_text(encoding="utf-8").splitlines())
    if re.fullmatch(r" [A-I]\d\d ", cells[1] if len(cells) > 3 else "")
}


@functools.cache
def functions_of(path):
    """The tests of a file, with their docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("case", ROWS)
def test_each_case_is_a_test_that_is_there_or_names_what_is_to_be_built(case):
    named = re.findall(r"`(\w+/\w+\.py)::(\w+)`", ROWS[case])
    assert named or re.search(r"not built yet: (issue \d|later)", ROWS[case])
    for path, name in named:
        assert name in functions_of(HERE.parent / path), path


def test_each_case_that_is_a_test_here_is_in_the_table():
    assert len(ROWS) == 68
    for path in HERE.glob("test_*.py"):
        if path.name == "test_table.py":
            continue
        for name, docstring in functions_of(path).items():
            assert re.match(r"[A-I]\d\d: ", docstring), name
            assert f"`cases/{path.name}::{name}`" in ROWS[docstring[:3]], name
