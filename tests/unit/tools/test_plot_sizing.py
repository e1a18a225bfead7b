"""Drawings of a plan: well-formed, alone, and what the checked-in example says."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import plot_sizing

EXAMPLE = Path(__file__).parents[3] / "docs" / "operations" / "sizing"
_AGAIN = (
    "run `python tools/plot_sizing.py docs/operations/sizing/example.json docs/operations/sizing`"
)


@pytest.mark.parametrize(
    ("name", "draw"),
    [("attained.svg", plot_sizing.attained_svg), ("pairs.svg", plot_sizing.pairs_svg)],
)
def test_the_drawings_of_the_guide_are_of_its_example(name: str, draw: object) -> None:
    assert callable(draw)
    plan = json.loads((EXAMPLE / "example.json").read_text())
    drawn = draw(plan)
    assert drawn == (EXAMPLE / name).read_text(), _AGAIN
    root = ElementTree.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


def test_every_pair_is_a_cell_and_the_answer_is_outlined() -> None:
    plan = json.loads((EXAMPLE / "example.json").read_text())
    cells = plot_sizing.pairs_svg(plan)
    pairs = [t for t in plan["tried"] if not t["num_aggregated"]]
    assert cells.count("<title>") == len(pairs)
    assert cells.count(" chosen") == 1 + cells[: cells.index("</style>")].count(" chosen")
