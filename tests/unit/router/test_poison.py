"""Who is blamed for a worker's death, by the published rule and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.router.poison import (
    OpenWork,
    PoisonConfig,
    Quarantine,
    RecentDeaths,
    Verdict,
    blame,
    prompt_digest,
)

OLD, NEW, SUSPECT, OLD_SUSPECT = (
    {"is_new": False, "num_deaths": 0},
    {"is_new": True, "num_deaths": 0},
    {"is_new": True, "num_deaths": 1},
    {"is_new": False, "num_deaths": 1},
)


def works(*kinds: dict[str, int]) -> list[OpenWork]:
    """Numbered from 1."""
    return [
        OpenWork(number, is_new=bool(kind["is_new"]), num_deaths=kind["num_deaths"])
        for number, kind in enumerate(kinds, 1)
    ]


def test_work_that_has_progressed_is_not_to_blame() -> None:
    assert blame(works(OLD, OLD_SUSPECT), 1) == Verdict((), None, "none_new")
    assert blame([], 0) == Verdict((), None, "none_new")


def test_a_first_death_makes_suspects_of_all_that_were_new() -> None:
    assert blame(works(OLD, NEW, NEW), 0) == Verdict((2, 3), None, "first_death")


def test_the_only_suspect_at_a_second_death_is_quarantined() -> None:
    """Those that never were at a death are not suspected beside one that was."""
    assert blame(works(NEW, SUSPECT, OLD, NEW), 1) == Verdict((), 2, "only_suspect")


def test_several_suspects_are_not_punished_together() -> None:
    assert blame(works(SUSPECT, NEW, SUSPECT), 1) == Verdict((1, 3), None, "several_suspects")


def test_where_workers_die_anyway_a_suspect_needs_more_deaths_than_there_are_without_it() -> None:
    """Two of its own and one other is enough, two others are too many."""
    assert blame(works(SUSPECT), 2).quarantined == 1
    assert blame(works(SUSPECT), 3) == Verdict((1,), None, "workers_die_anyway")
    thrice = {"is_new": True, "num_deaths": 2}
    assert blame(works(thrice), 4).quarantined == 1
    assert blame(works(thrice), 40).quarantined is None


@given(st.lists(st.sampled_from([OLD, NEW, SUSPECT, OLD_SUSPECT]), max_size=12), st.integers(0, 9))
def test_nobody_is_quarantined_at_the_first_death_or_for_old_work(
    kinds: list[dict[str, int]], num_recent: int
) -> None:
    verdict = blame(works(*kinds), num_recent)
    if verdict.quarantined is not None:
        assert kinds[verdict.quarantined - 1] == SUSPECT
        assert kinds.count(SUSPECT) == 1
    assert all(kinds[number - 1]["is_new"] for number in verdict.suspects)


def test_deaths_are_forgotten_after_a_while() -> None:
    deaths = RecentDeaths(PoisonConfig(storm_s=10.0))
    for moment in (0.0, 5.0, 9.0):
        deaths.note(moment)
    assert [deaths.count(moment) for moment in (9.0, 10.5, 15.5, 30.0)] == [3, 2, 1, 0]


def test_quarantine_is_per_tenant_ends_and_has_a_bound() -> None:
    quarantine = Quarantine(PoisonConfig(ttl_s=10.0, max_entries=3))
    quarantine.add("a", b"1", now=0.0)
    assert quarantine.holds("a", b"1", now=9.9)
    assert not quarantine.holds("b", b"1", now=9.9)
    assert not quarantine.holds("a", b"1", now=10.0)
    assert len(quarantine) == 0
    for number in range(5):
        quarantine.add("a", bytes([number]), now=20.0 + number)
    assert len(quarantine) == 3
    assert [quarantine.holds("a", bytes([n]), now=25.0) for n in range(5)] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_a_prompt_quarantined_again_is_held_for_the_full_time() -> None:
    quarantine = Quarantine(PoisonConfig(ttl_s=10.0))
    quarantine.add("a", b"1", now=0.0)
    quarantine.add("a", b"2", now=5.0)
    quarantine.add("a", b"1", now=8.0)
    assert quarantine.holds("a", b"1", now=17.0)
    assert not quarantine.holds("a", b"2", now=17.0)


def test_digests_tell_prompts_apart() -> None:
    digests = {prompt_digest(np.array(ids, dtype=np.uint32)) for ids in ([1], [1, 0], [256], [2])}
    assert len(digests) == 4
