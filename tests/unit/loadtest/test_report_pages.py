"""Pages are one file that fetches nothing, and nothing told to them can change what they are."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from loadtest.junit import junit
from loadtest.metrics_file import metrics_file
from loadtest.report.page import report_page
from loadtest.report.search_page import frontier
from loadtest.result import CompareResult, RunResult, SearchResult
from loadtest.summary import summary
from tests.support.load_results import (
    HOSTILE,
    make_compare,
    make_hostile,
    make_records,
    make_run,
    make_search,
    make_split_search,
)

VOID = {"meta", "link", "br"}
TAGS = (
    "html head title style body main header section h1 h2 h3 p div span b i strong ul li figure"
    " figcaption svg g line polyline polygon circle rect text table caption thead tbody tr th td"
    " details summary pre"
)
KNOWN_TAGS = VOID | set(TAGS.split())


class Page(HTMLParser):
    """What a browser would build: tags in balance, attributes, text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.plots: list[str] = []  # what they are in words
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "svg":
            self.plots.append(dict(attrs)["aria-label"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_is_closed_and_harmless(page: Page) -> None:
    assert page.open == []
    assert set(page.tags) <= KNOWN_TAGS
    assert {name for name, _ in page.attributes if name.startswith("on")} == set()
    assert [value for name, value in page.attributes if name in ("href", "src")] == ["data:,"]


@pytest.fixture(scope="module")
def run() -> RunResult:
    return make_run(make_records(1500))


@pytest.fixture(
    scope="module", params=[make_search, make_compare, lambda: make_run(make_records(60))]
)
def result(request: pytest.FixtureRequest) -> RunResult | SearchResult | CompareResult:
    made: RunResult | SearchResult | CompareResult = request.param()
    return made


def test_a_page_is_whole_and_names_no_address(
    result: RunResult | SearchResult | CompareResult,
) -> None:
    text = report_page(result)
    check_is_closed_and_harmless(Page(text))
    assert re.findall(r"https?:|//[a-z]|url\(|@import|<script", text) == []
    assert "nan" not in re.findall(r"[\w.]+", text)


def test_the_page_of_ten_thousand_requests_is_below_a_megabyte() -> None:
    """Nothing in it grows with their number."""
    run = make_run(make_records(10_000, max_chunks=5))
    assert len(report_page(run).encode()) < 200_000


def test_a_run_shows_its_figures(run: RunResult) -> None:
    page = Page(report_page(run))
    text = " ".join(page.texts)
    for told in (
        "chat_rt",
        "OK",
        "kind long",
        "TTFT: share of requests within a time",
        "SLO 450 ms",
        "slowest 1 % (15)",
        "TTFT by stage, from fast to slow requests",
        "Requests a second",
        "In flight and queued",
        "Workers",
        "Pool prefill, by its autoscaler",
        "What kept a pool from the size that metrics asked for",
        "cache miss",
        "overloaded",
        "$ per M good tokens",
        "127.0.0.1:50051",
        "cached, of what could have been",
        "The client and the server share this machine.",
        "TTFT by kind",
    ):
        assert told.lower() in text.lower()


def test_runs_and_searches_of_nothing_have_pages_and_summaries() -> None:
    nothing = make_run([])
    one = make_run(make_records(1))
    search = make_search().model_copy(
        update={"probes": (), "verified": (), "best_rps": None, "knee_rps": None, "cost": None}
    )
    blank = {"a": None, "b": None, "change": None, "low": None, "high": None, "p_value": None}
    compared = make_compare()
    metrics = tuple(metric.model_copy(update=blank) for metric in compared.metrics)
    compare = compared.model_copy(update={"a": nothing, "b": one, "metrics": metrics})
    for result in (nothing, one, search, compare):
        check_is_closed_and_harmless(Page(report_page(result)))
        assert summary(result)
        assert junit(result)
        assert metrics_file(result)


def test_every_plot_has_words_for_those_who_do_not_see_it(
    result: RunResult | SearchResult | CompareResult,
) -> None:
    page = Page(report_page(result))
    assert page.tags.count("svg") >= 1
    assert page.tags.count("figure") == page.tags.count("svg") == len(page.plots)
    assert all(len(label) > 30 for label in page.plots)


def test_a_percentile_the_sample_cannot_bear_is_not_shown() -> None:
    text = " ".join(Page(report_page(make_run(make_records(60)))).texts)
    assert "too few requests" in text


def test_what_failed_is_told_first(run: RunResult) -> None:
    failed = run.checks[1].model_copy(update={"is_ok": False, "message": "Sent too late."})
    page = report_page(run.model_copy(update={"checks": (run.checks[0], failed)}))
    assert page.index("Sent too late.") < page.index(run.checks[0].message)


def test_names_and_messages_cannot_break_out(run: RunResult) -> None:
    page = Page(report_page(make_hostile(run)))
    check_is_closed_and_harmless(page)
    assert any("<script>alert(1)</script>" in text for text in page.texts)


def test_a_comparison_and_a_search_cannot_be_broken_out_of() -> None:
    compared = make_compare()
    metrics = tuple(
        metric.model_copy(update={"name": HOSTILE, "reason": HOSTILE})
        for metric in compared.metrics
    )
    search = make_search()
    probes = tuple(probe.model_copy(update={"reason": HOSTILE}) for probe in search.probes)
    for result in (
        compared.model_copy(
            update={
                "name_a": HOSTILE,
                "name_b": HOSTILE,
                "metrics": metrics,
                "warnings": (HOSTILE,),
                "verdict_reason": HOSTILE,
            }
        ),
        search.model_copy(update={"probes": probes, "verdict_reason": HOSTILE}),
    ):
        check_is_closed_and_harmless(Page(report_page(result)))


def test_splits_of_the_workers_are_told_apart_and_repeated_runs_once() -> None:
    page = Page(report_page(make_split_search()))
    check_is_closed_and_harmless(page)
    texts = page.texts
    at = texts.index("By split")
    told = [text for text in texts[at : at + 20] if text.strip()]
    assert told[1:13] == [
        "highest rate met", "goodput there", "lowest rate missed",
        "2 prefill, 2 decode", "12/s", "11.9/s", "16/s",
        "3 prefill, 1 decode", "8/s", "7.92/s", "10/s",
        "Probes",
    ]  # fmt: skip
    assert texts.count("2 prefill, 2 decode") == 1 + 4 + 5  # of legends, of probes


def test_the_frontier_is_what_no_other_point_beats_in_both() -> None:
    assert frontier([(1, 9), (2, 7), (2, 8), (3, 8), (4, 1), (3, 3)]) == [(1, 9), (3, 8), (4, 1)]
    assert frontier([]) == []
