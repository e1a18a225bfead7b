from __future__ import annotations

from services.common.ids import WorkerId
from services.registry.base import LoadReport
from services.registry.cost import Booked
from services.router.output_lengths import OutputLengths
from services.router.policy import (
    NO_LINKS,
    PolicyConfig,
    RequestFacts,
    ask_for,
    expected_tokens,
    lay_out,
)
from services.router.view import ClusterView
from services.sim.placement import worker_info, worker_view


def test_what_is_usual_holds_until_answers_show_another_length() -> None:
    lengths = OutputLengths(256)
    assert (lengths.expected(4096), lengths.expected(16)) == (256, 16)
    for i in range(100):
        lengths.note(4000, 1000, float(i))
    assert 850 < lengths.expected(4000) < 1000
    assert lengths.expected(2100) == lengths.expected(4000), "an octave is one class"
    assert lengths.expected(16) == 16, "long answers say nothing of short limits"
    for i in range(200):
        lengths.note(4000, 10, 10_000.0 + i)
    assert lengths.expected(4000) < 50, "what is old weighs less"


def test_many_short_limits_do_not_shorten_what_long_ones_expect() -> None:
    lengths = OutputLengths(256)
    for i in range(1000):
        lengths.note(1, 1, float(i))
    assert lengths.expected(4096) == 256
    assert lengths.expected(1) == 1


def test_the_learned_length_is_in_the_price() -> None:
    view = ClusterView(
        tuple(
            worker_view(slot, 1, worker_info(WorkerId(role), role), LoadReport(), Booked())
            for slot, role in enumerate(("prefill", "decode"))
        ),
        0.0,
    )
    config = PolicyConfig()
    arena = lay_out(view, config, NO_LINKS)
    for learned, priced in ((None, 256), (900, 900), (9000, 1000)):
        facts = RequestFacts("r", 100, 1000, n=2, expected_output=learned)
        ask = ask_for(facts, config, arena, frozenset())
        assert expected_tokens(facts, config) == ask.need_tokens == 100 + 2 * priced
        assert ask.decode_tokens == min(priced, 999)
