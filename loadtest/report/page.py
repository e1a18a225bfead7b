"""`report.html` of whichever result. Pure."""

from __future__ import annotations

from loadtest.report.compare_page import compare_page
from loadtest.report.run_page import run_page
from loadtest.report.search_page import search_page
from loadtest.result import CompareResult, RunResult, SearchResult


def report_page(result: RunResult | SearchResult | CompareResult) -> str:
    """Make the one file a browser opens."""
    match result:
        case RunResult():
            return run_page(result)
        case SearchResult():
            return search_page(result)
        case CompareResult():
            return compare_page(result)
