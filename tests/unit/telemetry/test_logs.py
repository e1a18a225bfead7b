from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from services.telemetry.logs import get_logger, setup_logging

SENTINEL = "sent1nel-value-xyz"


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    saved = (list(root.handlers), root.level, sys.excepthook, threading.excepthook)
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in saved[0]:
        root.addHandler(handler)
    root.setLevel(saved[1])
    sys.excepthook, threading.excepthook = saved[2], saved[3]


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_record_has_event_static_and_event_fields() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", static={"worker_id": "w1"}, stream=stream)
    get_logger("services.x").info("transfer.committed", blocks=12, ms=3.5)
    (record,) = lines_of(stream)
    del record["ts"]
    assert record == {
        "level": "info",
        "event": "transfer.committed",
        "logger": "services.x",
        "worker_id": "w1",
        "blocks": 12,
        "ms": 3.5,
    }


def test_level_filters_before_anything_is_rendered() -> None:
    stream = io.StringIO()
    setup_logging("warning", "json", stream=stream)
    log = get_logger("services.x")
    log.info("quiet.event")
    log.debug("quiet.event")
    log.warning("loud.event")
    assert [record["event"] for record in lines_of(stream)] == ["loud.event"]


def test_fields_cannot_replace_the_head_of_a_record() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", stream=stream)
    get_logger("services.x").info("real.event", level="fatal", logger="other", ts="never")
    (record,) = lines_of(stream)
    assert (record["level"], record["logger"]) == ("info", "services.x")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_secret_appears_in_no_form_of_record(log_format: str) -> None:
    """RB-118: neither fields, text of other libraries, nor exceptions show a secret."""
    stream = io.StringIO()
    setup_logging("debug", log_format, secrets=[SENTINEL], stream=stream)
    log = get_logger("services.x")
    log.info("a.b", url=f"redis://:{SENTINEL}@h", prompt="tell me", other=SENTINEL)
    logging.getLogger("redis").warning("cannot reach %s", SENTINEL)
    try:
        raise ValueError(f"bad {SENTINEL}")
    except ValueError:
        log.exception("c.d")
    text = stream.getvalue()
    assert text.count("\n") >= 3
    assert SENTINEL not in text
    assert "tell me" not in text


def test_console_values_cannot_forge_a_second_line() -> None:
    stream = io.StringIO()
    setup_logging("info", "console", stream=stream)
    get_logger("services.x").info("a.b", name="x\n12:00:00 info fake.event")
    assert stream.getvalue().count("\n") == 1


def test_uncaught_exception_of_a_thread_is_logged_redacted() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", secrets=[SENTINEL], stream=stream)

    def fail() -> None:
        raise RuntimeError(f"lost {SENTINEL}")

    thread = threading.Thread(target=fail, name="engine")
    thread.start()
    thread.join()
    (record,) = lines_of(stream)
    assert (record["event"], record["thread"]) == ("thread.uncaught", "engine")
    assert SENTINEL not in stream.getvalue()
    assert "RuntimeError" in str(record["exception"])


def test_setting_up_twice_writes_each_record_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("info", "json", stream=first)
    setup_logging("info", "json", stream=second)
    get_logger("services.x").info("a.b")
    assert (len(lines_of(first)), len(lines_of(second))) == (0, 1)
