"""Draw what `isthmus plan --json` found: attainment over cost, and the pairs that were tried.

`python tools/plot_sizing.py PLAN.json DIRECTORY` writes attained.svg and pairs.svg.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.plots.chart import Axis, LinePlot, Mark, Series, line_plot
from loadtest.plots.markup import Markup, join, tag
from loadtest.plots.numbers import count

# As the report's page has it; a file that stands alone has to bring what it needs of it.
_STYLE = """svg{background:#fff;color:#5a6675;font:12px system-ui,sans-serif}
text{fill:#5a6675}.row,.told{fill:#1b2430}.grid{stroke:#dfe3e8}.axis{stroke:#5a6675}
.mark{stroke:#5a6675;stroke-width:1.4;stroke-dasharray:5 4}
.line{fill:none;stroke:currentColor;stroke-width:2}.band{fill:currentColor;opacity:.18}
.dot,.name{fill:currentColor}.c1{color:#0072b2}.c2{color:#d55e00}
.meets{fill:#00875f}.unresolved{fill:#c58a00}.fails{fill:#d55e00}.chosen{stroke:#1b2430;stroke-width:3}"""
_CELL, _LEFT, _TOP = 34, 70, 34
_OUTCOMES = {"meets": "enough", "unresolved": "not certain", "fails": "too small"}

Tried = Mapping[str, Any]  # one entry of the JSON's `tried`


def attained_svg(plan: Mapping[str, Any]) -> str:
    """Draw attainment over dollars an hour, the best of each price and kind."""
    kinds = (("two pools", False), ("one pool", True))
    plot = LinePlot(
        "Attainment over cost",
        "the best size of each price, with its interval",
        Axis("$ an hour", count, low=0.0),
        Axis("requests within the SLO", lambda share: f"{share:.0%}", low=0.0, high=1.0),
        [
            _series(name, number, (t for t in plan["tried"] if bool(t["num_aggregated"]) == is_one))
            for number, (name, is_one) in enumerate(kinds, 1)
        ],
        [Mark(plan["slo"]["attain"], "target", is_horizontal=True)],
    )
    figure = line_plot(plot)
    drawing = figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")]
    names = [
        tag("text", name, x=300, y=150 + 18 * number, class_=f"name c{number}")
        for number, (name, _) in enumerate(kinds, 1)
    ]
    return _file(Markup(drawing.replace("</svg>", join(*names) + "</svg>")))


def _series(name: str, colour: int, tried: Iterable[Tried]) -> Series:
    best: dict[float, Tried] = {}
    for trial in sorted(tried, key=lambda t: (t["usd_per_h"], t["attainment"])):
        best[trial["usd_per_h"]] = trial
    return Series(
        name,
        [(usd, trial["attainment"]) for usd, trial in best.items()],
        band=[(usd, trial["low"], trial["high"]) for usd, trial in best.items()],
        labels=[trial["size"] for trial in best.values()],
        colour=colour,
    )


def pairs_svg(plan: Mapping[str, Any]) -> str:
    """Draw every pair of pools that was tried as a cell: enough, not certain, or too small."""
    pairs = [t for t in plan["tried"] if not t["num_aggregated"]]
    prefills = sorted({t["num_prefill"] for t in pairs})
    decodes = sorted({t["num_decode"] for t in pairs}, reverse=True)
    cells = [_cell(trial, plan["two_pools"], prefills, decodes) for trial in pairs]
    bottom = _TOP + _CELL * len(decodes)
    labels = [
        *(_text(str(p), _LEFT + _CELL * (i + 0.5), bottom + 16) for i, p in enumerate(prefills)),
        *(_text(str(d), _LEFT - 14, _TOP + _CELL * (i + 0.6)) for i, d in enumerate(decodes)),
        _text("prefill workers", _LEFT + _CELL * len(prefills) / 2, bottom + 36),
        tag("text", "decode workers", x=8, y=_TOP - 14),
    ]
    right = _LEFT + _CELL * len(prefills) + 24
    keys = [
        join(
            tag("rect", x=right, y=_TOP + 22.0 * i, width=14.0, height=14.0, class_=outcome),
            tag("text", words, x=right + 20, y=_TOP + 22.0 * i + 12),
        )
        for i, (outcome, words) in enumerate(_OUTCOMES.items())
    ]
    height = max(bottom + 46, _TOP + 80)
    box = f"0 0 {right + 110} {height}"
    told = "Pairs of pools that were tried; the outlined one is the answer"
    return _file(tag("svg", *cells, *labels, *keys, viewBox=box, role="img", aria_label=told))


def _cell(
    trial: Tried, chosen: Mapping[str, Any] | None, prefills: Sequence[int], decodes: Sequence[int]
) -> Markup:
    column, row = prefills.index(trial["num_prefill"]), decodes.index(trial["num_decode"])
    is_chosen = chosen is not None and all(
        chosen[pool] == trial[pool] for pool in ("num_prefill", "num_decode")
    )
    return tag(
        "rect",
        tag("title", f"{trial['size']}: {trial['attainment']:.3f}"),
        x=float(_LEFT + _CELL * column + 1),
        y=float(_TOP + _CELL * row + 1),
        width=float(_CELL - 3),
        height=float(_CELL - 3),
        class_=trial["outcome"] + (" chosen" if is_chosen else ""),
    )


def _text(words: str, x: float, y: float) -> Markup:
    return tag("text", words, x=x, y=y, text_anchor="middle")


def _file(drawing: Markup) -> str:
    """Make a drawing a file of its own."""
    opened = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = opened.partition(">")
    return f"{head}><style>{_STYLE}</style>{rest}\n"


def main(arguments: Sequence[str]) -> int:
    """Read a plan and write its drawings."""
    source, target = map(Path, arguments)
    plan = json.loads(source.read_text())
    target.mkdir(parents=True, exist_ok=True)
    (target / "attained.svg").write_text(attained_svg(plan))
    (target / "pairs.svg").write_text(pairs_svg(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
