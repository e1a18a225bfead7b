"""`isthmus explain`: why a request ran where it did, and where its time went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits
from services.cli.router_options import ApiKey, CaFile, Servers, Tls

if TYPE_CHECKING:
    from services.pb import admin_pb2

_COLUMNS = ("worker", "cost", "more", "made of")


def explain(
    request_id: Annotated[
        str, typer.Argument(help="As in the answer's header x-isthmus-request-id.")
    ],
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Tell why a request ran where it did and where its time went; needs the scope admin."""
    from services.cli.client import message_fields
    from services.cli.routers import Routers, calling, complain
    from services.pb import admin_pb2

    routers = Routers.of(server, api_key, tls, ca_file)
    ask = admin_pb2.ExplainRequestRequest(request_id=request_id)
    reply = routers.ask_until(calling(lambda stub: stub.ExplainRequest, ask))
    if reply.answer is None:
        if reply.is_not_found:
            complain(reply)
        return exits.FAILED
    if as_json:
        found = message_fields(reply.answer)
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo("\n".join(explain_lines(reply.answer)))
    return exits.OK


def explain_lines(report: admin_pb2.ExplainRequestResponse) -> Iterator[str]:
    """Write the report for people."""
    yield from _head(report)
    for number, choice in enumerate(report.choices, start=1):
        yield ""
        yield f"{number}. {choice.worker_id}, mode {choice.mode}: {choice.reason}"
        yield from _indent(_candidates(choice))
    if report.ttft_stages:
        yield ""
        yield from _stages("time to first token", report.ttft_us, report.ttft_stages)
    if report.e2e_us:
        yield ""
        yield from _stages("whole request", report.e2e_us, report.stages)


def _head(report: admin_pb2.ExplainRequestResponse) -> Iterator[str]:
    who = f", tenant {report.tenant}" if report.tenant else ""
    yield f"{report.request_id}: {report.outcome}, model {report.model}{who}, {report.router_id}"
    if report.message:
        yield report.message
    received = datetime.fromtimestamp(report.received_unix_ms / 1000, UTC)
    yield (
        f"received {received.isoformat(timespec='milliseconds')}, "
        f"{report.prompt_tokens} prompt tokens ({report.cached_tokens} cached), "
        f"{report.completion_tokens} tokens out, {report.retries} retries"
    )


def _candidates(choice: admin_pb2.Choice) -> list[str]:
    rows: list[Sequence[str]] = [_COLUMNS]
    best_s = choice.candidates[0].cost_s if choice.candidates else 0.0
    for at, candidate in enumerate(choice.candidates):
        terms = [_term(name, value) for name, value in sorted(candidate.terms.items())]
        terms += [f"{name} {value}" for name, value in sorted(candidate.facts.items())]
        more = "chosen" if at == 0 else f"{(candidate.cost_s - best_s) * 1e3:+.3f} ms"
        rows.append(
            (candidate.worker_id, f"{candidate.cost_s * 1e3:.3f} ms", more, ", ".join(terms))
        )
    return _aligned(rows)


def _stages(title: str, total_us: int, stages: Sequence[admin_pb2.Stage]) -> Iterator[str]:
    yield f"{title}: {total_us / 1e3:.3f} ms"
    rows = [
        (stage.name, f"{stage.us / 1e3:.3f} ms", f"{stage.us / max(total_us, 1):.1%}")
        for stage in stages
    ]
    total = sum(stage.us for stage in stages)
    rows.append(("sum", f"{total / 1e3:.3f} ms", f"{total / max(total_us, 1):.1%}"))
    yield from _indent(_aligned(rows))


def _term(name: str, value: float) -> str:
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {value * 1e3:.3f} ms"
    return f"{name} {value:g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _indent(lines: Sequence[str]) -> Iterator[str]:
    return (f"   {line}" for line in lines)
