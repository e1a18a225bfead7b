from __future__ import annotations

from dataclasses import replace

import pytest

from services.registry.base import LoadReport
from services.router.admission import AdmissionConfig
from services.router.config import RouterConfig
from services.router.dispatch import facts_of
from services.router.policy import LOCAL, REMOTE, PolicyConfig, choose
from services.router.view import ClusterView
from tests.support.cluster import make_call
from tests.unit.router.test_policy import make_worker

SLOW = LoadReport(rate_tok_s=1000.0, tbt_a_us=80_000, kv_free=100, kv_total=100)


@pytest.mark.parametrize(
    ("asked_ms", "configured_s", "max_tbt_s"),
    [(0, 0.0, 0.0), (0, 0.05, 0.05), (200, 0.05, 0.2), (30, 0.0, 0.03)],
)
def test_the_policys_gap_between_tokens_counts_where_the_client_names_none(
    asked_ms: int, configured_s: float, max_tbt_s: float
) -> None:
    """Before, only admission heard of `admission.slo_tpot_ms`, and slow workers took prefill."""
    config = RouterConfig(admission=AdmissionConfig(slo_tpot_s=configured_s))
    facts = facts_of(replace(make_call([1] * 8), slo_tpot_ms=asked_ms), (), config)
    assert facts.max_tbt_s == max_tbt_s
    workers = (
        make_worker("p0", replace(SLOW, queued_uncached_tokens=900)),
        make_worker("d0", SLOW),
    )
    decision = choose(facts, ClusterView(workers, 0.0), {}, PolicyConfig())
    is_too_slow = 0 < max_tbt_s < 0.08
    assert decision.mode == (REMOTE if is_too_slow else LOCAL)
