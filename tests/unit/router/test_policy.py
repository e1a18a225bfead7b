from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import RequestError
from services.common.ids import WorkerId
from services.registry.base import LoadReport
from services.registry.cost import Booked
from services.router.booking import Bookings
from services.router.policy import (
    LOCAL,
    REMOTE,
    STAY,
    Decision,
    Links,
    PolicyConfig,
    RequestFacts,
    choose,
    choose_decode,
    worker_seed,
)
from services.router.view import ClusterView, WorkerView
from tests.support.registry import make_worker_info

CONFIG = PolicyConfig(bypass_tokens=0)


def make_worker(
    worker_id: str,
    load: LoadReport | None = None,
    *,
    booked: Booked | None = None,
    state: str = "live",
    up_since: float | None = 0.0,
    **identity: Any,
) -> WorkerView:
    """Build a worker; its role is in its name."""
    role = "prefill" if worker_id.startswith("p") else "decode"
    info = make_worker_info(worker_id, role=role, **identity)
    return WorkerView(
        worker_id=info.worker_id, role=role, state=state, reason="" if state == "live" else "why",
        info=info, incarnation=info.incarnation, slot=0, slot_gen=1, lease_left_ms=2000,
        load=load or LoadReport(kv_free=100, kv_total=100), booked=booked or Booked(),
        up_since=up_since,
    )  # fmt: skip


def make_view(*workers: WorkerView, at: float = 1000.0) -> ClusterView:
    """Build a view."""
    return ClusterView(workers, at)


def facts(num_tokens: int = 320, *, force: str | None = None, root: bytes = b"r") -> RequestFacts:
    """Build a request."""
    return RequestFacts("req", num_tokens, 64, prefix_root=root, force_mode=force)


def decide(view: ClusterView, depth: Mapping[str, int] | None = None, **options: str) -> Decision:
    """Choose for a plain request."""
    depths = {WorkerId(w): d for w, d in (depth or {}).items()}
    return choose(facts(force=options.get("force")), view, depths, CONFIG)


def test_remote_when_both_pools_live() -> None:
    decision = decide(make_view(make_worker("p0"), make_worker("d0")))
    assert (decision.mode, decision.worker.worker_id) == (REMOTE, "p0")
    assert decision.reason == "both_pools_live"


@pytest.mark.parametrize(
    ("present", "mode", "reason"),
    [("d0", LOCAL, "no_prefill_worker"), ("p0", STAY, "no_decode_worker")],
)
def test_one_pool_alone_serves(present: str, mode: str, reason: str) -> None:
    decision = decide(make_view(make_worker(present)))
    assert (decision.mode, decision.reason) == (mode, reason)


def test_no_worker_is_an_error_that_says_why() -> None:
    """RB-052: with a time to come back."""
    with pytest.raises(RequestError) as caught:
        decide(make_view(make_worker("p0", state="suspect")))
    assert caught.value.spec.code == "no_workers"
    assert "p0 is suspect: why" in caught.value.message
    assert caught.value.retry_after_ms


@pytest.mark.parametrize("state", ["draining", "suspect", "incompatible", "gone"])
def test_only_live_workers_are_chosen(state: str) -> None:
    """RB-053: one selection for all, and it never picks the first worker whatever its health."""
    view = make_view(make_worker("p0", state=state), make_worker("p1"), make_worker("d0"))
    assert decide(view).worker.worker_id == "p1"


@pytest.mark.parametrize("mode", [REMOTE, LOCAL, STAY])
def test_forced_mode_is_honoured_or_an_error(mode: str) -> None:
    full = make_view(make_worker("p0"), make_worker("d0"))
    decision = decide(full, force=mode)
    assert (decision.mode, decision.reason) == (mode, "forced")
    lacking = make_view(make_worker("p0")) if mode != STAY else make_view(make_worker("d0"))
    with pytest.raises(RequestError, match=mode):
        decide(lacking, force=mode)


def test_pair_of_different_identity_is_refused_by_name() -> None:
    """RB-027, RB-028: never paired; the forced error names the field and both values."""
    view = make_view(make_worker("p0", adapter_policy="a"), make_worker("d0", adapter_policy="b"))
    decision = decide(view)
    assert (decision.mode, decision.reason) == (LOCAL, "pair_refused")
    with pytest.raises(RequestError, match=r"adapter_policy differs: 'a' .* 'b'"):
        decide(view, force=REMOTE)


def test_prefill_without_a_compatible_decode_worker_is_passed_over() -> None:
    view = make_view(
        make_worker("p0", adapter_policy="old"), make_worker("p1"), make_worker("d0"),
        make_worker("d1"),
    )  # fmt: skip
    for root in (b"a", b"b", b"c", b"d"):
        decision = choose(facts(root=root), view, {}, CONFIG)
        assert decision.worker.worker_id == "p1"


def test_prefix_hit_beats_an_idle_peer_until_its_queue_costs_more() -> None:
    hit = {"p0": 4}  # 256 of 320 tokens
    busy = make_worker("p0", LoadReport(queued_uncached_tokens=100, kv_total=100, kv_free=100))
    assert decide(make_view(busy, make_worker("p1"), make_worker("d0")), hit).worker == busy
    swamped = make_worker("p0", LoadReport(queued_uncached_tokens=9000, kv_total=1, kv_free=1))
    decision = decide(make_view(swamped, make_worker("p1"), make_worker("d0")), hit)
    assert decision.worker.worker_id == "p1"
    terms = {t.worker_id: t for t in decision.terms}
    assert terms[WorkerId("p0")].hit_tokens == 256
    assert terms[WorkerId("p0")].uncached_tokens == 64
    assert terms[WorkerId("p1")].uncached_tokens == 320


def test_new_blocks_cost_more_where_they_push_prefixes_out() -> None:
    """A pool full of cached prefixes has room, but what is computed there is taken from others."""
    full = LoadReport(kv_free=100, kv_total=100, kv_cached=100, rate_tok_s=1000.0)
    empty = replace(full, kv_cached=0, queued_uncached_tokens=200)
    decision = decide(
        make_view(make_worker("p0", full), make_worker("p1", empty), make_worker("d0"))
    )
    assert decision.worker.worker_id == "p1"
    assert [t.uncached_tokens for t in decision.terms[:2]] == [320, 320]


def test_a_full_hit_still_computes_the_last_token() -> None:
    decision = decide(make_view(make_worker("p0"), make_worker("d0")), {"p0": 1000})
    assert decision.terms[0].uncached_tokens == 1


def test_faster_worker_takes_more() -> None:
    slow = LoadReport(rate_tok_s=1000, kv_free=1, kv_total=1)
    fast = LoadReport(rate_tok_s=4000, kv_free=1, kv_total=1)
    view = make_view(make_worker("p0", slow), make_worker("p1", fast), make_worker("d0"))
    assert decide(view).worker.worker_id == "p1"


def test_unmeasured_worker_is_priced_like_its_peers() -> None:
    """A restarted worker is used again although its peers have measured rates."""
    known = LoadReport(rate_tok_s=50_000, tbt_a_us=5000, tbt_b_us=1, kv_free=1000, kv_total=1000)
    view = make_view(
        make_worker("p0", known), make_worker("p1"), make_worker("d0", known), make_worker("d1")
    )
    chosen = {choose(facts(root=bytes([i])), view, {}, CONFIG).worker.worker_id for i in range(20)}
    assert chosen == {"p0", "p1"}
    source = view.workers[0]
    decoders = set()
    for i in range(20):
        decision = choose_decode(RequestFacts(f"r{i}", 10, 10), source, view, CONFIG)
        assert decision is not None
        decoders.add(decision.worker.worker_id)
    assert decoders == {"d0", "d1"}


def test_newcomer_does_not_draw_everything() -> None:
    """RB-034: at its start it looks as loaded as its peers; after the slow start as it is."""
    loaded = LoadReport(queued_uncached_tokens=4000, kv_free=1, kv_total=1)
    olds = [make_worker("d0"), *(make_worker(f"p{i}", loaded) for i in range(2))]
    new = make_worker("p9", up_since=999.9)
    just_now = {
        choose(facts(root=bytes([i])), make_view(*olds, new), {}, CONFIG).worker.worker_id
        for i in range(20)
    }
    assert len(just_now) > 1
    late = choose(facts(), make_view(*olds, new, at=1010.0), {}, CONFIG)
    assert late.worker.worker_id == "p9"


def test_decode_avoids_a_pool_that_cannot_hold_the_request() -> None:
    full = LoadReport(kv_free=2, kv_total=100)
    view = make_view(make_worker("p0"), make_worker("d0", full), make_worker("d1"))
    for i in range(8):
        decision = choose_decode(RequestFacts(f"r{i}", 320, 64), view.workers[0], view, CONFIG)
        assert decision is not None
        assert decision.worker.worker_id == "d1"
    only_full = make_view(make_worker("p0"), make_worker("d0", full))
    decision = choose_decode(facts(), only_full.workers[0], only_full, CONFIG)
    assert decision is not None, "a full pool queues; it is no reason to refuse"


def test_decode_needs_the_identity_of_the_prefill_worker() -> None:
    view = make_view(make_worker("p0"), make_worker("d0", rope="other"))
    assert choose_decode(facts(), view.workers[0], view, CONFIG) is None


def test_excluded_workers_are_not_tried_again() -> None:
    view = make_view(make_worker("p0"), make_worker("p1"), make_worker("d0"))
    gone = frozenset({WorkerId("p0")})
    assert choose(facts(), view, {}, CONFIG, gone).worker.worker_id == "p1"


def test_ties_follow_the_prefix_and_all_replicas_agree() -> None:
    view = make_view(*(make_worker(f"p{i}") for i in range(4)), make_worker("d0"))
    shuffled = ClusterView(tuple(reversed(view.workers)), view.at)
    chosen: list[str] = []
    for i in range(64):
        here = choose(facts(root=bytes([i]) * 16), view, {}, CONFIG).worker.worker_id
        assert choose(facts(root=bytes([i]) * 16), shuffled, {}, CONFIG).worker.worker_id == here
        chosen.append(here)
    assert {chosen.count(f"p{i}") > 4 for i in range(4)} == {True}
    # The rank must not depend on the process (PYTHONHASHSEED).
    assert worker_seed(WorkerId("w")) == 1782402172


def test_of_equal_prices_the_longer_hit_wins_and_then_the_shorter_queue() -> None:
    """The tie is a tenth of a long prefill: a queue of so much is no reason for one of two."""
    idle = LoadReport(kv_free=9999, kv_total=9999)
    busy = replace(idle, queued_uncached_tokens=700)
    view = make_view(*(make_worker(w, busy if w == "p0" else idle) for w in ("p0", "p1", "d0")))
    for i in range(16):
        prompt = facts(num_tokens=16_000, root=bytes([i]))
        assert choose(prompt, view, {}, CONFIG).worker.worker_id == "p1"
        held = {WorkerId("p0"): 4}
        assert choose(prompt, view, held, CONFIG).worker.worker_id == "p0"


@pytest.mark.parametrize("seed", range(20))
def test_frozen_reports_spread_evenly_over_equal_workers(seed: int) -> None:
    """RB-057, RB-058: choosing and booking are one step; max - min <= 1 after every round."""
    rng = random.Random(seed)
    bookings, loads = Bookings(), LoadReport(kv_free=9999, kv_total=9999)
    counts = dict.fromkeys(("p0", "p1", "p2", "p3"), 0)
    for i in range(256):
        view = make_view(
            *(
                make_worker(w, loads, booked=bookings.booked().get(WorkerId(w)))
                for w in rng.sample(sorted(counts), 4)
            ),
            make_worker("d0"),
        )
        decision = choose(facts(root=bytes([i])), view, {}, CONFIG)
        bookings.book(decision.worker.worker_id, 320, 0, float(i))
        counts[decision.worker.worker_id] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from("pd"), st.integers(0, 10**6), st.integers(0, 10**5),
            st.floats(0, 1e6), st.sampled_from(["live", "suspect", "draining"]),
        ),
        max_size=8,
    ),
    st.integers(1, 10**5),
    st.sampled_from([None, REMOTE, LOCAL, STAY]),
)  # fmt: skip
def test_any_view_gives_a_live_worker_of_the_right_role_or_no_workers(
    rows: list[tuple[str, int, int, float, str]], num_tokens: int, force: str | None
) -> None:
    workers = [
        make_worker(
            f"{role}{i}",
            LoadReport(queued_uncached_tokens=queued, kv_free=free, kv_total=free, rate_tok_s=rate),
            state=state,
        )
        for i, (role, queued, free, rate, state) in enumerate(rows)
    ]
    view = make_view(*workers)
    live = {w.role for w in workers if w.state == "live"}
    needed = {REMOTE: {"prefill", "decode"}, LOCAL: {"decode"}, STAY: {"prefill"}}
    if not live if force is None else not needed[force] <= live:
        with pytest.raises(RequestError) as caught:
            choose(facts(num_tokens, force=force), view, {}, CONFIG)
        assert caught.value.spec.code == "no_workers"
        return
    decision = choose(facts(num_tokens, force=force), view, {}, CONFIG)
    assert decision.worker.state == "live"
    assert decision.worker.role == ("decode" if decision.mode == LOCAL else "prefill")
    assert decision.terms[0].worker_id == decision.worker.worker_id
    assert all(t.cost_s >= 0 for t in decision.terms)


MEASURED = LoadReport(kv_free=9000, kv_total=9000, rate_tok_s=9000, tbt_a_us=9000, tbt_b_us=0.1)
BYPASS = PolicyConfig(bypass_tokens=512)


@pytest.mark.parametrize(
    ("tokens", "decode_load", "mode", "reason"),
    [
        (300, MEASURED, LOCAL, "bypass"),
        (600, MEASURED, REMOTE, "both_pools_live"),  # longer than a chunk
        (300, replace(MEASURED, running=8), REMOTE, "both_pools_live"),  # would stall eight
        (10, replace(MEASURED, running=1), LOCAL, "bypass"),  # stalls one for a millisecond
        (300, replace(MEASURED, queued_uncached_tokens=9000), REMOTE, "both_pools_live"),
    ],
)
def test_short_prompts_skip_the_prefill_pool_where_that_costs_less(
    tokens: int, decode_load: LoadReport, mode: str, reason: str
) -> None:
    """Modes are one argmin: a threshold alone bypasses nothing."""
    view = make_view(make_worker("p0", MEASURED), make_worker("d0", decode_load))
    decision = choose(facts(tokens), view, {}, BYPASS)
    assert (decision.mode, decision.reason) == (mode, reason)
    assert {t.mode for t in decision.terms} >= {REMOTE, STAY}
    for terms in decision.terms:
        parts = terms.prefill_s + terms.handoff_s + terms.decode_s + terms.extra_s
        assert terms.cost_s == pytest.approx(parts)


def test_a_long_prompt_that_decode_has_cached_skips_the_prefill_pool() -> None:
    view = make_view(make_worker("p0", MEASURED), make_worker("d0", MEASURED))
    decision = choose(facts(6400), view, {WorkerId("d0"): 96}, BYPASS)
    assert (decision.mode, decision.terms[0].uncached_tokens) == (LOCAL, 256)


def test_no_bypass_where_the_gap_is_above_what_the_client_calls_good() -> None:
    view = make_view(make_worker("p0", MEASURED), make_worker("d0", MEASURED))
    strict = replace(facts(300), max_tbt_s=0.005)
    assert choose(strict, view, {}, BYPASS).mode == REMOTE


@pytest.mark.parametrize(
    "decode_load",
    [replace(MEASURED, kv_free=3), replace(MEASURED, tbt_a_us=30_000)],
    ids=["full", "slow"],
)
def test_prefill_goes_on_where_decode_is_full_or_slow(decode_load: LoadReport) -> None:
    view = make_view(make_worker("p0", MEASURED), make_worker("d0", decode_load))
    decision = choose(facts(600), view, {}, BYPASS)
    assert (decision.mode, decision.reason) == (STAY, "decode_costlier")


def test_one_token_needs_no_handoff() -> None:
    view = make_view(make_worker("p0", MEASURED), make_worker("d0", MEASURED))
    decision = choose(replace(facts(600), max_tokens=1), view, {}, BYPASS)
    assert decision.mode == STAY


def test_a_broken_pair_is_passed_over() -> None:
    """A link may be bad while both its ends are healthy: another pair, or no handoff at all."""
    broken = frozenset({(WorkerId("p0"), WorkerId("d0"))})
    links = Links(broken=broken)
    both = make_view(make_worker("p0"), make_worker("p1"), make_worker("d0"))
    for root in (b"a", b"b", b"c", b"d"):
        decision = choose(facts(root=root), both, {}, CONFIG, links=links)
        assert (decision.mode, decision.worker.worker_id) == (REMOTE, "p1")
    alone = choose(facts(), make_view(both.workers[0], both.workers[2]), {}, CONFIG, links=links)
    assert (alone.mode, alone.reason) == (LOCAL, "pair_refused")
    assert choose_decode(facts(), both.workers[0], both, CONFIG, links=links) is None


def test_a_slow_link_costs_its_seconds() -> None:
    links = Links(token_s=1e-6, pairs={(WorkerId("p0"), WorkerId("d0")): 1e-3})
    view = make_view(make_worker("p0"), make_worker("p1"), make_worker("d0"))
    decision = choose(facts(), view, {}, CONFIG, links=links)
    assert decision.worker.worker_id == "p1"
    terms = {(t.worker_id, t.mode): t.handoff_s for t in decision.terms}
    assert terms[WorkerId("p0"), REMOTE] == pytest.approx(0.005 + 320e-3)
    assert terms[WorkerId("p1"), REMOTE] == pytest.approx(0.005 + 320e-6)


def test_of_many_workers_the_best_hits_and_the_idle_are_priced() -> None:
    """Above 64 a decision looks at a shortlist, which must hold the best by either measure."""
    busy = LoadReport(queued_uncached_tokens=50_000, kv_free=9, kv_total=9)
    many = [make_worker(f"p{i}", busy) for i in range(80)]
    view = make_view(*many, make_worker("d0"), make_worker("p99"))
    assert choose(facts(), view, {}, CONFIG).worker.worker_id == "p99"
    holder = make_worker("p98", LoadReport(queued_uncached_tokens=10, kv_free=9, kv_total=9))
    view = make_view(*many, make_worker("d0"), make_worker("p99"), holder)
    assert choose(facts(), view, {WorkerId("p98"): 5}, CONFIG).worker.worker_id == "p98"
