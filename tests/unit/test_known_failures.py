"""The index of known failures of such systems: every id has a test that names it, or a reason.

`tests/known_failures.json` maps each id to the tests that cover its kind of fault. A test that is
renamed or no longer names the id is found here; so is an id that fell out.
"""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = json.loads((ROOT / "tests/known_failures.json").read_text())
COVERED: dict[str, list[str]] = INDEX["covered"]
LATER: dict[str, str] = INDEX["later"]
NUM_CASES = 107
MEND = "mend tests/known_failures.json"


@functools.cache
def named_by(path: str) -> dict[str, str]:
    """Return what each test of a file says of itself: module, class and own docstring."""
    tree = ast.parse((ROOT / path).read_text())
    found: dict[str, str] = {}
    _collect(tree, ast.get_docstring(tree) or "", found)
    return found


def _collect(node: ast.AST, said: str, found: dict[str, str]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            own = said + (ast.get_docstring(child) or "")
            found[child.name] = own  # a state machine: its rules are the test
            _collect(child, own, found)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found[child.name] = said + (ast.get_docstring(child) or "")


@pytest.mark.parametrize("case", sorted(COVERED))
def test_every_test_of_a_case_exists_and_names_it(case: str) -> None:
    assert COVERED[case]
    for place in COVERED[case]:
        path, _, name = place.partition("::")
        assert (ROOT / path).is_file(), (
            f"{case}: there is no {path}; mend tests/known_failures.json"
        )
        said = named_by(path).get(name)
        assert said is not None, f"{case}: {path} has no {name}; mend tests/known_failures.json"
        assert case in said, f"{place} no longer names {case}"


def test_every_case_is_covered_or_has_a_reason() -> None:
    assert not COVERED.keys() & LATER.keys()
    assert len(COVERED) + len(LATER) == NUM_CASES
    assert all(len(reason) > 10 for reason in LATER.values())


def test_no_id_is_named_that_is_no_case() -> None:
    known = COVERED.keys() | LATER.keys()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        words = path.read_text().replace(",", " ").replace(":", " ").replace(".", " ").split()
        named = {word.strip('()"') for word in words if word.strip('("').startswith("RB-")}
        assert {name for name in named if name[3:].isdigit()} <= known, path
