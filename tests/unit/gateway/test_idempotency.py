"""The table of idempotency keys, under any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import RequestError
from services.gateway.idempotency import IdempotencyTable


def make_table(max_keys: int = 4, max_outputs: int = 10) -> IdempotencyTable[str]:
    return IdempotencyTable(max_keys, max_outputs, ttl_s=600.0)


def test_new_running_finished_and_expired() -> None:
    table = make_table()
    assert table.claim("t", "k", b"f", 0.0).reason == "new"
    table.start("t", "k", b"f", "run")
    assert table.claim("t", "k", b"f", 1.0) == table.claim("t", "k", b"f", 1.0)
    assert table.claim("t", "k", b"f", 1.0).reason == "join"
    table.finish("t", "k", 3, 10.0)
    replay = table.claim("t", "k", b"f", 609.9)
    assert (replay.reason, replay.run) == ("replay", "run")
    assert table.claim("t", "k", b"f", 610.0).reason == "new"


def test_other_body_is_refused_while_running_and_after() -> None:
    table = make_table()
    table.start("t", "k", b"f", "run")
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            table.claim("t", "k", b"other", 0.0)
        assert caught.value.spec.code == "duplicate_request"
        if table.claim("t", "k", b"f", 0.0).reason == "join":
            table.finish("t", "k", 1, 0.0)


def test_tenants_do_not_share_keys() -> None:
    table = make_table()
    table.start("t", "k", b"f", "run")
    assert table.claim("u", "k", b"other", 0.0).reason == "new"


def test_outputs_are_forgotten_before_the_status() -> None:
    table = make_table(max_outputs=5)
    for key in "ab":
        table.start("t", key, b"f", f"run {key}")
        table.finish("t", key, 4, 0.0)
    assert table.claim("t", "a", b"f", 1.0).reason == "forgotten"
    assert table.claim("t", "b", b"f", 1.0).reason == "replay"


def test_full_table_of_running_requests_refuses_new_keys() -> None:
    table = make_table(max_keys=2)
    table.start("t", "a", b"f", "run")
    table.start("t", "b", b"f", "run")
    with pytest.raises(RequestError) as caught:
        table.claim("t", "c", b"f", 0.0)
    assert caught.value.spec.code == "overloaded"
    table.finish("t", "a", 1, 0.0)
    assert table.claim("t", "c", b"f", 0.0).reason == "new"
    assert table.claim("t", "a", b"f", 0.0).reason == "new"  # made room


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["claim", "finish", "drop"]),
            st.sampled_from("abcdef"),
            st.integers(0, 6),
            st.floats(0, 400),
        ),
        max_size=60,
    )
)
def test_any_history_keeps_the_bounds(steps: list[tuple[str, str, int, float]]) -> None:
    table, running, now = make_table(), set[str](), 0.0
    for action, key, size, wait in steps:
        now += wait
        if action == "claim":
            try:
                reason = table.claim("t", key, b"f", now).reason
            except RequestError:
                assert len(running) == 4
            else:
                assert (reason == "join") == (key in running)
                if reason == "new":
                    table.start("t", key, b"f", key)
                    running.add(key)
        elif key in running:
            running.discard(key)
            if action == "finish":
                table.finish("t", key, size, now)
            else:
                table.drop("t", key)
        table.check_integrity()
