from __future__ import annotations

import asyncio
import csv
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import run
from services.common.clock import ManualClock
from services.common.errors import ConfigError, RequestError
from services.common.private_file import replace_private
from services.gateway import usage as usage_module
from services.gateway.accounting import Accounting
from services.gateway.metering import Bill
from services.gateway.namespaces import Namespaces, random_secret
from services.gateway.rate_limits import RateLimits
from services.gateway.usage import OTHERS, Usage, UsageBook, read_all, read_usage
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd


def delta(*ids: int) -> ChoiceDelta:
    return ChoiceDelta(0, 0, ids, "x")


def bill(book: UsageBook, *outputs: Any, prompt: int = 100) -> None:
    rates = RateLimits(None, Namespaces(random_secret()), ManualClock())
    made = Bill("acme", prompt, rates, book)
    made.open()
    for output in outputs:
        if isinstance(output, list):
            made.note_written(output)
        else:
            made.note(output)
    made.close()


async def test_counters_go_on_after_a_restart(tmp_path: Path) -> None:
    for life in range(1, 4):
        book = UsageBook(tmp_path, "r0")
        book.add("acme", Usage(1, 10, 4, 5))
        book.add("other", Usage(1))
        await book.close()
        assert read_all(tmp_path) == {
            "acme": Usage(life, 10 * life, 4 * life, 5 * life),
            "other": Usage(life),
        }


async def test_answers_are_billed_as_they_were_made(tmp_path: Path) -> None:
    """RB-082: cached tokens are in the bill as in the answer."""
    book = UsageBook(tmp_path, "r0")
    bill(book, delta(1), delta(2, 3), ChoiceEnd(0, "stop", None, 2), RequestEnd(100, 64, 2))
    await book.flush()
    # A token beyond the stop string was made and is not billed: the end says two.
    assert read_all(tmp_path)["acme"] == Usage(1, 100, 64, 2)
    bill(book, delta(1), [0.5, 0.75])  # broke off after three tokens
    await book.flush()
    assert read_all(tmp_path)["acme"] == Usage(2, 200, 64, 5)
    bill(book)  # failed before its first token
    await book.close()
    assert read_all(tmp_path)["acme"] == Usage(3, 200, 64, 5)


@pytest.mark.parametrize(
    ("code", "outputs", "left"),
    [
        ("overloaded", (), 150), ("no_workers", (), 150), ("draining", (), 150),
        ("worker_lost", (), 110), ("deadline_exceeded", (), 110), ("overloaded", (delta(1),), 109),
    ],
)  # fmt: skip
def test_a_prompt_that_no_worker_has_read_is_given_back(
    tmp_path: Path, code: str, outputs: tuple[Any, ...], left: int
) -> None:
    limits = tmp_path / "tenants.yaml"
    limits.write_text("default: {tokens_per_min: 150}")
    rates = RateLimits(limits, Namespaces(random_secret()), ManualClock())
    accounting = Accounting(rates, UsageBook(None, ""))

    def refuse() -> None:
        with rates.admitted("acme"), accounting.billed("acme", 40) as made:
            for output in outputs:
                made.note(output)
            raise RequestError(code, "the router's word")

    with pytest.raises(RequestError):
        refuse()
    with rates.admitted("acme") as verdict:
        assert verdict.tokens is not None
        assert verdict.tokens.remaining == left


async def test_routers_are_added_up_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for router in ("r0", "r1"):
        book = UsageBook(tmp_path, router)
        book.add("acme", Usage(1, 2, 3, 4))
        book.add('odd"name', Usage(1))
        await book.close()
    assert await asyncio.to_thread(run, ["usage", "export", "--dir", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0] == {
        "tenant": "acme", "requests": 2, "prompt_tokens": 4, "cached_tokens": 6,
        "completion_tokens": 8,
    }  # fmt: skip
    arguments = ["usage", "export", "--format", "csv", "--dir", str(tmp_path)]
    assert await asyncio.to_thread(run, arguments) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["tenant"] for row in found] == ["acme", 'odd"name']
    assert found[0]["completion_tokens"] == "8"


async def test_one_file_has_one_writer(tmp_path: Path) -> None:
    book = UsageBook(tmp_path, "r0")
    with pytest.raises(ConfigError, match=r"router\.router_id"):
        UsageBook(tmp_path, "r0")
    await book.close()
    await UsageBook(tmp_path, "r0").close()


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", '{"format": 2, "tenants": {}}', '{"format": 1, "tenants": {"a": {}}}',
        '{"format": 1, "tenants": {"a": {"requests": -1, "prompt_tokens": 0, "cached_tokens": 0, '
        '"completion_tokens": 0}}}',
    ],
)  # fmt: skip
def test_damaged_counters_are_not_begun_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r0.usage.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="damaged"):
        read_usage(path)
    with pytest.raises(ConfigError, match="damaged"):
        UsageBook(tmp_path, "r0")
    assert path.read_text() == content


async def test_what_the_disk_does_not_take_is_kept_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    book = UsageBook(tmp_path, "r0")
    book.add("acme", Usage(1))
    with monkeypatch.context() as patched:
        patched.setattr(usage_module, "replace_private", full)
        assert [await book.flush() for _ in range(3)] == [False] * 3
    assert [r.message for r in caplog.records] == ["gateway.usage_not_written"]
    book.add("acme", Usage(1))
    assert await book.flush()
    assert read_all(tmp_path) == {"acme": Usage(2)}
    await book.close()


async def test_tenants_beyond_the_bound_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "_MAX_TENANTS", 2)
    book = UsageBook(tmp_path, "r0")
    for i in range(5):
        book.add(f"t{i}", Usage(1))
    await book.close()
    assert read_all(tmp_path) == {OTHERS: Usage(3), "t0": Usage(1), "t1": Usage(1)}


async def test_a_flush_that_is_cancelled_never_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(path: Path, text: str) -> None:
        began.set()
        assert go_on.wait(20)
        replace_private(path, text)

    book = UsageBook(tmp_path, "r0")
    book.add("acme", Usage(1))
    monkeypatch.setattr(usage_module, "replace_private", slow)
    flushing = asyncio.create_task(book.flush())
    assert await asyncio.to_thread(began.wait, 20)
    flushing.cancel()
    await asyncio.wait([flushing])
    book.add("acme", Usage(1))
    closing = asyncio.create_task(book.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert read_all(tmp_path) == {"acme": Usage(2)}
