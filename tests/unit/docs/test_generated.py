from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import IsthmusConfig
from services.common.config_source import iter_fields
from services.telemetry import catalog
from services.telemetry.catalog import Counter, all_metrics, all_spans
from tools import adr_index, gen_docs, gen_protos

ROOT = Path(__file__).resolve().parents[3]
CATALOG = ROOT / "services/telemetry/catalog.py"
CONFIG = ROOT / "services/common/config.py"
# Consent, asked for when the configuration is loaded.
ONLY_CHECKED = frozenset({"allow_unauthenticated", "allow_plaintext"})
METRIC_NAME = re.compile(r"isthmus_[a-z0-9_]+")
EVENT_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception"})
NOT_METRICS = frozenset({"isthmus_parent_pid", "isthmus_fields"})


def sources() -> list[Path]:
    return [p for p in sorted((ROOT / "services").rglob("*.py")) if p.parent.name != "pb"]


@pytest.mark.parametrize("page", sorted(gen_docs.pages(), key=str), ids=str)
def test_generated_page_is_up_to_date(page: Path) -> None:
    assert (ROOT / page).read_text() == gen_docs.pages()[page], "run `make docs`"


def test_generated_protos_are_up_to_date() -> None:
    assert gen_protos.main(["--check"]) == 0


def test_decisions_have_valid_headers_and_an_index() -> None:
    adrs, faults = adr_index.load(adr_index.ADR_DIR)
    assert faults == []
    assert len(adrs) >= 9
    assert (adr_index.ADR_DIR / adr_index.INDEX).read_text() == adr_index.build_index(adrs)


GOOD = """# 0001 Title

| Date | 2026-01-02 |
|---|---|
| Author | someone |
| Status | Accepted |
| Tags | a |

## Context
## Decision
## Consequences
## Rejected
"""


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("1-x.md", ("", ""), "must be named"),
        ("0002-x.md", ("", ""), "first line must be"),
        ("0001-x.md", ("| Author | someone |\n", ""), "no row `| Author"),
        ("0001-x.md", ("2026-01-02", "yesterday"), "is not YYYY-MM-DD"),
        ("0001-x.md", ("Accepted", "Maybe"), "status must be one of"),
        ("0001-x.md", ("## Rejected\n", ""), "section `## Rejected` is missing"),
        ("0001-x.md", ("## Context\n## Decision", "## Decision\n## Context"), "in this order"),
        ("0001-x.md", ("## Rejected\n", "## Rejected\n" + "x\n" * 90), "fits on one page"),
    ],
)
def test_wrong_decision_is_refused_by_name(name: str, change: tuple[str, str], fault: str) -> None:
    text = GOOD.replace(*change) if change[0] else GOOD
    _, faults = adr_index.read_adr(name, text)
    assert any(fault in found for found in faults), faults


def test_right_decision_passes() -> None:
    adr, faults = adr_index.read_adr("0001-x.md", GOOD)
    assert faults == []
    assert adr is not None
    assert (adr.title, adr.status, adr.date) == ("Title", "Accepted", "2026-01-02")


def test_catalogue_names_are_well_formed_and_unique() -> None:
    names = [metric.name for metric in all_metrics()] + [span.name for span in all_spans()]
    assert len(names) == len(set(names))
    for metric in all_metrics():
        assert METRIC_NAME.fullmatch(metric.name)
        assert metric.name.endswith("_total") == isinstance(metric, Counter), metric.name
        assert metric.description.endswith(".")
        assert not {"request_id", "user", "prompt"} & set(metric.labels)


def uses_of(module: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in sources():
        if path != module:
            yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())))


def test_every_catalogue_entry_is_written_by_the_code() -> None:
    """An entry nobody writes is a promise in docs/metrics.md that is not kept."""
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for _, node in uses_of(CATALOG)
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    entries = {
        name: entry
        for name, entry in vars(catalog).items()
        if isinstance(entry, (catalog.Counter, catalog.Gauge, catalog.Histogram, catalog.Span))
    }
    assert len(entries) == len(all_metrics()) + len(all_spans())
    assert sorted(entries.keys() - used) == []


def test_every_span_attribute_is_set_where_its_span_is() -> None:
    """Attributes are keyword arguments, in a file that names the span."""
    keywords: dict[Path, set[str]] = {}
    named_in: dict[str, set[Path]] = {}
    for path, node in uses_of(CATALOG):
        if isinstance(node, ast.Call):
            found = {keyword.arg for keyword in node.keywords if keyword.arg}
            keywords.setdefault(path, set()).update(found)
        elif isinstance(node, ast.Attribute):
            named_in.setdefault(node.attr, set()).add(path)
    for constant, span in vars(catalog).items():
        if isinstance(span, catalog.Span):
            given = set().union(*(keywords[path] for path in named_in.get(constant, ())))
            assert sorted(set(span.attributes) - given) == [], constant


def test_every_setting_is_read() -> None:
    """A setting that changes nothing is worse than none. `section.field`, or a bound section."""
    read = {node.attr for _, node in uses_of(CONFIG) if isinstance(node, ast.Attribute)}
    checked = {
        node.attr
        for node in ast.walk(ast.parse(CONFIG.read_text()))
        if isinstance(node, ast.Attribute)
    }
    unread = [
        field.key
        for field in iter_fields(IsthmusConfig)
        if field.key.partition(".")[2] not in read | (checked & ONLY_CHECKED)
    ]
    assert unread == []


def test_code_uses_catalogue_names_only() -> None:
    known = {metric.name for metric in all_metrics()} | NOT_METRICS
    stray = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and METRIC_NAME.fullmatch(node.value)
        and node.value not in known
    ]
    assert stray == []


def test_only_telemetry_makes_instruments_and_spans() -> None:
    calls = ("create_counter", "create_histogram", "create_observable_gauge", "start_span")
    stray = [
        f"{path.relative_to(ROOT)}: {call}"
        for path in sources()
        if path.parent.name != "telemetry"
        for call in (*calls, "prometheus_client")
        if call in path.read_text()
    ]
    assert stray == []


def log_calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOG_METHODS
                and ast.unparse(node.func.value) in ("log", "self._log", "logger", "LOG")
            ):
                yield path, node


def test_log_events_are_constant_dotted_names() -> None:
    stray = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in log_calls()
        if not (
            node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
            and EVENT_NAME.fullmatch(node.args[0].value)
        )
    ]
    assert stray == []
    assert sum(1 for _ in log_calls()) > 10


def test_links_between_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
