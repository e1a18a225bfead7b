"""Schedules: sessions in order, prefixes really shared, everything by the seed."""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.records import PlannedRequest
from loadtest.scenario import parse_scenario
from loadtest.schedule import Schedule, make_schedule
from services.common.errors import ConfigError

ROOT = Path(__file__).parents[3]
DATA = ROOT / "loadtest/data"
TRACE = ROOT / "tests/data/mooncake_conversation_first_120.jsonl.gz"
CHATS = {"kind": "sharegpt_lengths", "file": "sharegpt_lengths_400conv.csv.gz", "turns": 4}
AGENT: dict[str, Any] = {
    "kind": "agent", "tree": [1, 2], "roles": 3, "zipf": 1.0, "system": 64, "task": 16,
    "tool": {"median": 40, "sigma": 0.5}, "osl": 12, "tool_wait_s": 0.5,
}  # fmt: skip
RAG = {"kind": "prefix_groups", "groups": 20, "prefix": 512, "suffix": 16, "osl": 8, "zipf": 1.1}


def schedule(
    workload: dict[str, Any],
    arrivals: dict[str, Any] | None = None,
    base: Path = DATA,
    salt: str = "",
    **more: Any,
) -> Schedule:
    values = {
        "name": "x",
        "arrivals": arrivals or {"kind": "poisson", "rate_rps": 10},
        "workload": workload,
        "phases": {"measure_s": 30},
    }
    return make_schedule(parse_scenario(values | more, "x.yaml"), base, salt)


def keys(request: PlannedRequest) -> list[int]:
    return [piece.key for piece in request.prompt.pieces]


@pytest.mark.parametrize("workload", [CHATS, AGENT, RAG], ids=lambda w: w["kind"])
def test_equal_seeds_give_equal_requests(workload: dict[str, Any]) -> None:
    first = schedule(workload).sessions()

    assert first == schedule(workload).sessions()
    assert first != schedule(workload, seed=1).sessions()
    numbers = [request.number for session in first for request in session]
    assert len(set(numbers)) == len(numbers)


def test_a_salt_changes_every_token_and_no_length() -> None:
    first, other = schedule(RAG).sessions(), schedule(RAG, salt="run 2").sessions()

    for (a,), (b,) in zip(first, other, strict=True):
        assert not set(keys(a)) & set(keys(b))
        assert a.prompt.num_tokens == b.prompt.num_tokens
        assert (a.at_s, a.max_tokens) == (b.at_s, b.max_tokens)


@given(rate=st.floats(0.5, 20), measure_s=st.floats(1, 20))
def test_no_session_begins_after_the_end(rate: float, measure_s: float) -> None:
    sessions = schedule(
        RAG, {"kind": "poisson", "rate_rps": rate}, phases={"measure_s": measure_s}
    ).sessions()

    begins = [session[0].at_s or 0.0 for session in sessions]
    assert begins == sorted(begins)
    assert all(0 <= at < measure_s for at in begins)


def test_turns_follow_one_another_and_send_what_was_said() -> None:
    sessions = schedule(CHATS | {"think_s": 2.0, "system": 32}).sessions()

    assert {len(session) for session in sessions} == {1, 2, 3, 4}
    for session in sessions:
        assert session[0].at_s is not None
        assert session[0].prompt.pieces[0].role == "system"
        for before, turn in pairwise(session):
            assert (turn.at_s, turn.after) == (None, before.number)
            assert turn.wait_s > 0
            *said, answer, _ = turn.prompt.pieces
            assert tuple(said) == before.prompt.pieces
            assert (answer.role, answer.num_tokens) == ("assistant", before.max_tokens)


def test_conversations_stay_within_the_context() -> None:
    sessions = schedule(CHATS | {"max_isl": 600, "max_osl": 100}).sessions()

    requests = [request for session in sessions for request in session]
    assert max(request.prompt.num_tokens for request in requests) == 600
    assert max(request.max_tokens for request in requests) == 100


def test_calls_of_an_agent_form_the_tree() -> None:
    session = schedule(AGENT).sessions()[0]

    head = session[0].number
    after = [None if r.after is None else r.after - head for r in session]
    assert after == [None, 0, 1, 1]
    for request in session[1:]:
        assert request.after is not None
        parent = session[request.after - head]
        assert request.prompt.pieces[:-2] == parent.prompt.pieces
        assert request.prompt.pieces[-2].num_tokens == parent.max_tokens


def test_prefixes_are_shared_as_often_as_zipf_says() -> None:
    sessions = schedule(RAG, {"kind": "offline", "sessions": 20_000}, phases={}).sessions()

    asked = Counter(keys(request)[0] for (request,) in sessions)
    weights = [(k + 1) ** -1.1 for k in range(20)]
    expected = [20_000 * w / sum(weights) for w in weights]
    found = sorted(asked.values(), reverse=True)
    assert len(found) == 20
    assert found == pytest.approx(expected, rel=0.15)
    assert len({keys(request)[1] for (request,) in sessions}) == 20_000


def test_a_recorded_trace_keeps_its_instants_lengths_and_sharing() -> None:
    workload = {"kind": "mooncake", "file": TRACE.name}
    sessions = schedule(workload, {"kind": "trace", "speedup": 2}, TRACE.parent, phases={})
    requests = [request for (request,) in sessions.sessions()]

    assert len(requests) == 120
    assert len({keys(request)[0] for request in requests}) == 1  # block 0 is in all of them
    recorded = gzip.decompress(TRACE.read_bytes()).decode().splitlines()
    assert f'"input_length": {requests[5].prompt.num_tokens}' in recorded[5]
    assert f'"timestamp": {round((requests[119].at_s or 0) * 2000)}' in recorded[119]


def test_a_window_of_a_trace_keeps_row_beside_row() -> None:
    workload = {"kind": "mooncake", "file": TRACE.name}
    whole = schedule(workload, {"kind": "trace"}, TRACE.parent, phases={}).sessions()
    window = {"kind": "trace", "from_s": 9, "to_s": 20, "speedup": 10}
    part = schedule(workload, window, TRACE.parent, phases={}).sessions()

    expected = [r for (r,) in whole if r.at_s is not None and 9 <= r.at_s < 20]
    assert [r.number for (r,) in part] == [r.number for r in expected]
    assert [r.prompt for (r,) in part] == [r.prompt for r in expected]
    assert [r.at_s for (r,) in part] == pytest.approx([((r.at_s or 0) - 9) / 10 for r in expected])


def test_a_scaled_trace_shares_as_much() -> None:
    workload = {"kind": "mooncake", "file": TRACE.name, "scale": 0.05, "max_isl": 900}
    requests = [r for (r,) in schedule(workload, {"kind": "trace"}, TRACE.parent,
                phases={}).sessions()]  # fmt: skip

    assert max(request.prompt.num_tokens for request in requests) < 1_000
    assert {request.prompt.pieces[0].num_tokens for request in requests} == {26}


def test_a_trace_that_ends_begins_anew_without_sharing() -> None:
    workload = {"kind": "mooncake", "file": TRACE.name}
    offline = {"kind": "offline", "sessions": 240}
    requests = [r for (r,) in schedule(workload, offline, TRACE.parent, phases={}).sessions()]

    assert requests[0].prompt.num_tokens == requests[120].prompt.num_tokens
    assert not set(keys(requests[0])) & set(keys(requests[120]))


def test_parts_of_a_mixed_workload_come_by_weight_and_from_their_time() -> None:
    workload = {"kind": "mixed", "parts": [
        {"name": "short", "weight": 9, "workload": {"kind": "fixed", "isl": 10, "osl": 1}},
        {"name": "long", "weight": 1, "from_s": 15,
         "workload": {"kind": "fixed", "isl": 160, "osl": 1}},
    ]}  # fmt: skip
    rate = {"kind": "poisson", "rate_rps": 200}
    requests = [r for (r,) in schedule(workload, rate).sessions()]

    long = [r for r in requests if r.kind == "long"]
    assert {r.prompt.num_tokens for r in long} == {160}
    assert min(r.at_s or 0 for r in long) >= 15
    late = sum((r.at_s or 0) >= 15 for r in requests)
    assert len(long) / late == pytest.approx(0.1, rel=0.15)


def test_shares_of_a_mix_come_by_weight_and_whole_sessions_at_a_time() -> None:
    mix = [{"tenant": "a", "weight": 3}, {"tenant": "b", "priority": 2, "temperature": 0.7}]
    sessions = schedule(CHATS, {"kind": "offline", "sessions": 4_000}, phases={},
                        mix=mix).sessions()  # fmt: skip

    of_a = sum(session[0].tenant == "a" for session in sessions)
    assert of_a / len(sessions) == pytest.approx(0.75, rel=0.05)
    for session in sessions:
        assert len({(r.tenant, r.priority) for r in session}) == 1
        assert all((r.seed is None) == (r.tenant == "a") for r in session)


def test_users_go_on_with_sessions_nobody_else_has() -> None:
    users = schedule(CHATS, {"kind": "users", "users": 3, "think_s": 1.0})

    heads = [users.next_of_lane(lane, turn, 0.0)[0] for lane in range(3) for turn in range(5)]
    assert users.is_closed
    assert len({head.number for head in heads}) == 15
    assert all(head.at_s is None and head.wait_s > 0 for head in heads)
    busy = schedule(CHATS, {"kind": "concurrency", "sessions": 3})
    assert busy.next_of_lane(2, 4, 0.0)[0].wait_s == 0


def test_a_warm_cache_is_told_every_shared_prefix() -> None:
    rag = schedule(RAG)
    warming = rag.warming()

    assert len(warming) == 20
    assert all(request.max_tokens == 1 for request in warming)
    told = {keys(request)[0] for request in warming}
    assert {keys(request)[0] for (request,) in rag.sessions()} <= told


def test_too_high_a_rate_is_refused_before_a_session_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loadtest.schedule.MAX_REQUESTS", 50)
    monkeypatch.setattr(Schedule, "_session", None)
    at_rate = {"kind": "constant", "rate_rps": 60}
    with pytest.raises(ConfigError, match="more than 50 requests; lower the rate"):
        schedule(CHATS, at_rate, phases={"measure_s": 1}).sessions()


@pytest.mark.parametrize(
    ("workload", "arrivals", "message"),
    [
        (CHATS | {"file": "none.csv"}, None, "none.csv: No such file"),
        (CHATS | {"file": "README.md"}, None, "does not begin with conv,turn"),
        (RAG, {"kind": "trace"}, "only workloads mooncake and azure"),
    ],
)
def test_what_is_wrong_with_files_is_said(
    workload: dict[str, Any], arrivals: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(workload, arrivals, phases={"measure_s": 1}).sessions()


def test_a_part_that_is_left_out_changes_nothing_of_the_others() -> None:
    parts = [
        {"name": name, "weight": weight, "workload": {"kind": "fixed", "isl": isl, "osl": 2}}
        for name, weight, isl in (("short", 3, 8), ("long", 1, 64))
    ]
    whole = schedule({"kind": "mixed", "parts": parts})
    without = make_schedule(whole.scenario, DATA, left_out="long")

    shorts = [session for session in whole.sessions() if session[0].kind == "short"]
    assert without.sessions() == shorts
    assert 0 < len(shorts) < len(whole.sessions())
    assert whole.sessions() is whole.sessions()  # made once
