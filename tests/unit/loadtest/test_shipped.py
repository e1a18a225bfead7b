"""Every shipped scenario is valid in both forms, and its short one fits the default model."""

from __future__ import annotations

import pytest

from loadtest.launch import check_lengths
from loadtest.options import find_scenario, read_scenario, shipped_names
from loadtest.schedule import ideal_hit_ratio, make_schedule
from loadtest.target import TargetFacts, TargetUnusable
from services.common.errors import ConfigError

SMALL = TargetFacts(kind="grpc", address="x", model="small", context_length=8192)


def test_all_that_were_promised_are_shipped() -> None:
    promised = {"long16k", "long8k", "chat_rt", "burst", "rag", "agents", "offline", "chaos"}
    assert promised == set(shipped_names())


@pytest.mark.parametrize("name", shipped_names())
def test_the_short_form_fits_a_laptop(name: str) -> None:
    whole, base = read_scenario(name, quick=False, rate=None, seed=None)
    quick, _ = read_scenario(name, quick=True, rate=None, seed=None)
    schedule = make_schedule(quick, base)
    requests = [request for session in schedule.sessions() for request in session]

    assert whole.name == name
    assert make_schedule(whole, base).sessions()
    assert 10 <= len(requests) <= 100
    assert sum(r.prompt.num_tokens + 8 * r.max_tokens for r in requests) < 60_000
    assert (quick.phases.end_s or quick.budget_s) <= 60
    check_lengths(schedule, SMALL)


def test_what_does_not_fit_is_refused_with_its_length() -> None:
    scenario, base = read_scenario("long16k", quick=False, rate=None, seed=None)

    with pytest.raises(TargetUnusable, match="16640 tokens in one request, and small has"):
        check_lengths(make_schedule(scenario, base), SMALL)


def test_flags_change_rate_and_seed() -> None:
    scenario, _ = read_scenario("chat_rt", quick=False, rate=9.0, seed=5)

    assert scenario.seed == 5
    assert scenario.arrivals.model_dump()["rate_rps"] == 9.0
    with pytest.raises(ConfigError, match=r"there is no scenario nope: .*chat_rt"):
        find_scenario("nope")


def test_a_cache_without_end_would_have_what_prompts_share() -> None:
    rag, base = read_scenario("rag", quick=False, rate=None, seed=None)
    burst, _ = read_scenario("burst", quick=True, rate=None, seed=None)

    ideal = ideal_hit_ratio(make_schedule(rag, base))
    assert ideal is not None
    assert 0.8 < ideal < 8192 / (8192 + 256)  # each document once is missing
    assert ideal_hit_ratio(make_schedule(burst, base)) == 0
