"""`junit.xml`: what a CI reads. Every limit of the SLO and every check is a test case. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from loadtest.plots import numbers
from loadtest.plots.markup import printable
from loadtest.report.curves import scenario_name, slo_limits_ms
from loadtest.result import CompareResult, Distribution, RunResult, SearchResult

# Of a run; a search is asked for a share of its own.
REQUIRED_SHARE = 0.95
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str


def junit(result: RunResult | SearchResult | CompareResult) -> str:
    """Write a result as one test suite."""
    match result:
        case RunResult():
            return _suite(scenario_name(result.scenario), result.duration_s, list(_run(result)))
        case SearchResult():
            name = f"{scenario_name(result.scenario)} search"
            return _suite(name, result.duration_s, list(_search(result)))
        case CompareResult():
            name = f"{result.name_b} against {result.name_a}"
            return _suite(name, result.a.duration_s + result.b.duration_s, list(_compare(result)))


def _run(result: RunResult) -> Iterator[_Case]:
    yield _case("verdict", is_ok=result.verdict == "OK", message=result.verdict_reason)
    for check in result.checks:
        name = f"check {check.name}"
        if check.state == "not judged":
            yield _Case(name, "skipped", check.message)
        else:
            yield _case(name, is_ok=check.is_ok, message=check.message)
    if result.attainment is not None:
        share = numbers.percent(result.attainment.value)
        told = f"{share} of requests within the SLO, {numbers.percent(REQUIRED_SHARE)} wanted"
        yield _case("slo", is_ok=result.attainment.value >= REQUIRED_SHARE, message=told)
    for name, limit_ms in slo_limits_ms(result.scenario).items():
        yield _limit(name, limit_ms, result.distributions.get(name))


def _limit(name: str, limit_ms: float, found: Distribution | None) -> _Case:
    percentiles = () if found is None else found.percentiles
    value = next((p.value for p in percentiles if p.share == REQUIRED_SHARE), None)
    at = f"p{REQUIRED_SHARE * 100:g}"
    title = f"slo {numbers.title_of(name)} {at}"
    if value is None:
        return _Case(title, "skipped", f"too few requests for a {at}")
    told = f"{numbers.milliseconds(value)}, at most {numbers.milliseconds(limit_ms)} wanted"
    return _case(title, is_ok=value <= limit_ms, message=told)


def _search(result: SearchResult) -> Iterator[_Case]:
    yield _case("search", is_ok=result.verdict == "FOUND", message=result.verdict_reason)
    for number, probe in enumerate(result.verified, start=1):
        yield _case(f"verified {number}", is_ok=probe.state == "met", message=probe.reason)


def _compare(result: CompareResult) -> Iterator[_Case]:
    for metric in result.metrics:
        is_known = metric.verdict != "inconclusive"
        if is_known:
            yield _case(metric.name, is_ok=metric.verdict == "better", message=metric.reason)
        else:
            yield _Case(metric.name, "skipped", metric.reason)


def _case(name: str, *, is_ok: bool, message: str) -> _Case:
    return _Case(name, "passed" if is_ok else "failed", message)


def _suite(name: str, duration_s: float, cases: list[_Case]) -> str:
    suite = ElementTree.Element(
        "testsuite",
        name=_text(f"loadtest {name}"),
        tests=str(len(cases)),
        failures=str(sum(case.outcome == "failed" for case in cases)),
        skipped=str(sum(case.outcome == "skipped" for case in cases)),
        errors="0",
        time=f"{duration_s:.3f}",
    )
    for case in cases:
        element = ElementTree.SubElement(
            suite, "testcase", classname=_text(f"loadtest.{name}"), name=_text(case.name), time="0"
        )
        if case.outcome == "passed":
            ElementTree.SubElement(element, "system-out").text = _text(case.message)
        else:
            kind = "failure" if case.outcome == "failed" else "skipped"
            ElementTree.SubElement(element, kind, message=_text(case.message))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", printable(text))
