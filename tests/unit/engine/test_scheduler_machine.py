"""Random lives of work items: nothing leaks, everything ends once, tokens are always right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.sampling import SamplingParams
from services.engine.api import (
    AttachReleased,
    EndReason,
    FirstToken,
    MigrateRefused,
    OfferReady,
    PrefillFinished,
    RequestKey,
    ResumedChoice,
    WorkKind,
)
from services.kv.attached import AttachedKv
from tests.support.attached_peer import AttachedPeer, receive_attached
from tests.support.engine_rig import EngineRig, make_request, prompt_of
from tests.support.fake_model import reference_tokens

EOS = 4


class EngineMachine(RuleBasedStateMachine):
    """RB-004, RB-006, RB-013, RB-014, RB-016, RB-017, RB-019, RB-085; I1, I3, I4, I10."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = EngineRig(
            num_blocks=14,
            max_num_seqs=5,
            max_step_tokens=64,
            max_chunk_tokens=24,
            initial_chunk_tokens=24,
            eos_token_ids=(EOS,),
            max_open_requests=12,
            head_grace_s=0.05,
            attach_move_after_tokens=3,
            attach_move_blocks=1,
            attach_move_blocks_urgent=2,
        )
        self.peer = AttachedPeer(num_blocks=256)
        self.attached: dict[str, AttachedKv] = {}  # read in the peer's pool
        for _ in range(16):
            self.rig.scheduler.stats.ended(2)  # expect little: let too many in, have to preempt
        self.sent: dict[str, tuple[npt.NDArray[np.uint32], SamplingParams, WorkKind]] = {}
        self.started: dict[str, tuple[int, ...]] = {}  # tokens made elsewhere before
        self.forms: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.resumed: dict[str, tuple[ResumedChoice, ...]] = {}

    # -- what may happen -------------------------------------------------------------------

    @rule(
        length=st.integers(1, 70),
        seed=st.integers(0, 1),
        kind=st.sampled_from(list(WorkKind)),
        max_tokens=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(0, 2),
        patience=st.sampled_from([0.03, 1e6, 1e6, 1e6]),
        num_generated=st.sampled_from([0, 0, 1, 2, 9, 17]),
        kv_form=st.sampled_from(["", "", "float32>int8", "?"]),
    )
    def submit(
        self,
        length: int,
        seed: int,
        kind: WorkKind,
        max_tokens: int,
        n: int,
        temperature: float,
        priority: int,
        patience: float,
        num_generated: int,
        kv_form: str,
    ) -> None:
        key = f"r{len(self.sent)}"
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, n=n)
        prompt = prompt_of(70, seed)[:length]
        if kind is WorkKind.CONTINUE and not self.firsts(prompt, params):
            return  # nothing went on: no such hand-off
        generated: tuple[int, ...] = ()
        resumed: tuple[ResumedChoice, ...] = ()
        known = [self.expected(prompt, params, c)[: num_generated + 1][:-1] for c in range(n)]
        if n == 1:
            generated = tuple(known[0])  # what is known never ended the choice
        elif kind is WorkKind.WHOLE and num_generated:
            # The last choice is over already, the others have come as far as they have.
            resumed = tuple(ResumedChoice(c, tuple(known[c][: 5 + c])) for c in range(n - 1))
        self.resumed[key] = resumed
        self.sent[key] = (prompt, params, kind)
        self.started[key] = generated
        self.forms[key] = kv_form if kind is WorkKind.CONTINUE else ""
        deadline = self.rig.now + patience
        request = make_request(
            key,
            prompt,
            params,
            kind,
            deadline=deadline,
            priority=priority,
            generated=generated,
            resumed=resumed,
            kv_form=self.forms[key],
        )
        self.rig.submit(request)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.take_back_what_was_let_go()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), mid_step=st.booleans())
    def cancel(self, data: st.DataObject, mid_step: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.sent)))
        self.cancelled.add(key)
        if mid_step:
            self.rig.step(between=lambda: self.rig.cancel(key))
        else:
            self.rig.cancel(key)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), is_pause=st.booleans(), mid_step=st.booleans())
    def pause_or_resume(self, data: st.DataObject, is_pause: bool, mid_step: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.sent)))
        change = self.rig.pause if is_pause else self.rig.resume
        if mid_step:
            self.rig.step(between=lambda: change(key))
        else:
            change(key)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def migrate(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sent)))
        was_lent, num_ends = key in self.rig.lent, self.rig.outputs[key].num_ends
        self.rig.migrate(key)
        output = self.rig.outputs[key]
        if output.of(MigrateRefused):
            output.events = [e for e in output.events if not isinstance(e, MigrateRefused)]
            assert (key in self.rig.lent, output.num_ends) == (was_lent, num_ends)
            return
        assert output.end.handed_off
        assert not was_lent
        (offer,), (final,) = output.of(OfferReady), output.of(PrefillFinished)
        prompt, params, _ = self.sent[key]
        expected = self.expected(prompt, params, 0)
        assert list(offer.generated) == expected[: len(offer.generated)]
        assert offer.num_tokens == final.num_tokens == len(prompt) + len(offer.generated) - 1
        assert final.first == (FirstToken(0, offer.generated[-1]),)
        assert final.tail_valid_tokens == offer.num_tokens % 16

    @precondition(lambda self: self.rig.lent)
    @rule(data=st.data(), mid_step=st.booleans())
    def release(self, data: st.DataObject, mid_step: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.rig.lent)))
        if mid_step:
            self.rig.step(between=lambda: self.rig.release(key))
        else:
            self.rig.release(key)

    @precondition(lambda self: self.rig.lent)
    @rule(data=st.data(), mid_step=st.booleans(), in_order=st.booleans())
    def unpin(self, data: st.DataObject, mid_step: bool, in_order: bool) -> None:
        """I5: only what the sender gave back; the rest stays lent with its content."""
        key = data.draw(st.sampled_from(sorted(self.rig.lent)))
        given = self.rig.unpinned.get(key, set())
        left = [b for b in self.rig.lent_blocks(key) if b not in given]
        if not self.rig.outputs[key].of(PrefillFinished) or not left:
            return  # prefill still reads them
        count = data.draw(st.integers(1, len(left)))
        some = left[:count] if in_order else data.draw(st.permutations(left))[:count]
        if mid_step:
            self.rig.step(between=lambda: self.rig.unpin(key, tuple(some)))
        else:
            self.rig.unpin(key, tuple(some))

    @precondition(lambda self: self.rig.reserved)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.rig.reserved)))
        self.end_receive(key)

    @precondition(lambda self: self.rig.reserved)
    @rule(data=st.data(), takes_all=st.booleans())
    def receive_in_place(self, data: st.DataObject, takes_all: bool) -> None:
        """Some blocks of the prompt, or all of them, stay in the pool of who computed them."""
        key = data.draw(st.sampled_from(sorted(self.rig.reserved)))
        lent = [i for i, b in enumerate(self.rig.reserved[key].block_ids) if b is not None]
        if self.forms[key] or not lent:
            return
        indexes = (
            lent if takes_all else sorted(data.draw(st.sets(st.sampled_from(lent), min_size=1)))
        )
        self.attached[key] = kv = self.peer.attach(self.rig.prompts[key], indexes)
        receive_attached(self.rig, key, kv, self.newest(key))
        self.take_back_what_was_let_go()

    @rule(
        length=st.integers(16, 70),
        seed=st.integers(0, 1),
        max_tokens=st.integers(2, 40),
        count=st.integers(0, 8),
    )
    def attach_and_go_on(self, length: int, seed: int, max_tokens: int, count: int) -> None:
        key, prompt = f"r{len(self.sent)}", prompt_of(70, seed)[:length]
        params = SamplingParams(temperature=0.0, seed=seed, max_tokens=max_tokens)
        if not self.firsts(prompt, params):
            return
        self.sent[key] = (prompt, params, WorkKind.CONTINUE)
        self.started[key], self.forms[key] = (), ""
        self.rig.submit(make_request(key, prompt, params, WorkKind.CONTINUE))
        self.rig.step()
        if key not in self.rig.reserved:
            return  # no room now
        lent = [i for i, b in enumerate(self.rig.reserved[key].block_ids) if b is not None]
        if lent:
            self.attached[key] = kv = self.peer.attach(prompt, lent)
            receive_attached(self.rig, key, kv, self.newest(key))
        else:  # every full block is here already
            self.end_receive(key)
        self.steps(count)

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), mid_step=st.booleans())
    def peer_takes_a_block_for_free(self, data: st.DataObject, mid_step: bool) -> None:
        """What no owner may do, done: it costs time, never a wrong token."""
        kv = self.attached[data.draw(st.sampled_from(sorted(self.attached)))]
        at = data.draw(st.integers(0, len(kv) - 1))
        if mid_step:
            self.rig.on_step = lambda _plan: self.peer.reuse(kv, at)
            self.rig.step()
            self.rig.on_step = None
        else:
            self.peer.reuse(kv, at)
        self.take_back_what_was_let_go()

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def peer_wants_its_blocks_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.attached)))
        self.rig.scheduler.move_attached(RequestKey(key))

    @precondition(lambda self: self.rig.opened)
    @rule(data=st.data(), recompute=st.booleans())
    def receive_fails(self, data: st.DataObject, recompute: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.rig.opened)))
        if key in self.rig.reserved:  # half written rubbish
            for block_id in self.rig.reserved[key].block_ids:
                if block_id is not None:
                    self.rig.cells[block_id] = 12345
        self.rig.fail_receive(key, recompute=recompute)
        if not recompute:
            self.cancelled.add(key)

    def take_back_what_was_let_go(self) -> None:
        """The moment the engine has let go of blocks their owner writes rubbish into them."""
        for key, kv in list(self.attached.items()):
            released = self.rig.outputs[key].of(AttachReleased)
            assert len(released) <= 1
            if released:
                self.peer.take_back(kv)
                del self.attached[key]

    # -- what must hold --------------------------------------------------------------------

    @invariant()
    def pool_and_requests_agree(self) -> None:
        self.rig.scheduler.check_integrity()

    @invariant()
    def attached_blocks_go_back_once(self) -> None:
        self.take_back_what_was_let_go()
        attached = self.rig.scheduler.load().blocks_attached
        assert attached <= sum(len(kv) for kv in self.attached.values())

    @invariant()
    def lent_blocks_stay_as_they_were(self) -> None:
        for key in self.rig.lent:
            given = self.rig.unpinned.get(key, set())
            for block_id in self.rig.lent_blocks(key):
                assert block_id in given or self.rig.pool.num_refs(block_id) > 0

    @invariant()
    def tokens_are_right_so_far(self) -> None:
        for key, (prompt, params, _) in self.sent.items():
            output = self.rig.outputs[key]
            for choice, got in output.tokens.items():
                start = output.first_index[choice]
                assert got == self.expected(prompt, params, choice)[start : start + len(got)]

    def teardown(self) -> None:
        """Let everything end by itself: no work item is ever stuck."""
        for key in self.sent:
            self.rig.resume(key)
        for _ in range(400):
            for key in sorted(self.rig.opened):
                if key in self.rig.reserved:
                    self.end_receive(key)
                elif key not in self.rig.prompts or self.is_ending(key):
                    self.rig.fail_receive(key, recompute=False)
            for key in sorted(self.rig.lent):
                if self.rig.outputs[key].num_ends:
                    self.rig.release(key)
            self.rig.step()
            if not self.rig.scheduler.load().requests_open:
                break
        self.rig.assert_at_rest()
        self.take_back_what_was_let_go()
        assert not self.attached
        for key, sent in self.sent.items():
            self.check_output(key, *sent)

    def check_output(
        self,
        key: str,
        prompt: npt.NDArray[np.uint32],
        params: SamplingParams,
        kind: WorkKind,
    ) -> None:
        output = self.rig.outputs[key]
        assert output.num_ends == 1
        if output.refused is not None or output.end.reason in (
            EndReason.CANCELLED,
            EndReason.ERROR,
        ):
            return
        if output.end.handed_off and kind is not WorkKind.PREFILL:
            return  # it migrated: what it said and lent was checked then
        if kind is WorkKind.PREFILL:
            check = self.check_handed_on if self.started[key] else self.check_prefill
            check(key, prompt, params)
            return
        choices = list(range(params.n))
        if self.resumed.get(key):
            starts = {one.choice: len(one.generated) for one in self.resumed[key]}
            assert output.first_index == starts
            choices = list(starts)
        elif self.started[key]:
            assert set(output.first_index.values()) == {len(self.started[key])}
        elif kind is WorkKind.CONTINUE and set(output.first_index.values()) == {1}:
            choices = [first.choice for first in self.firsts(prompt, params)]
        for choice in choices:
            start = output.first_index[choice]
            assert output.tokens[choice] == self.expected(prompt, params, choice)[start:]

    def check_prefill(
        self, key: str, prompt: npt.NDArray[np.uint32], params: SamplingParams
    ) -> None:
        output = self.rig.outputs[key]
        firsts = [self.expected(prompt, params, choice)[:1] for choice in range(params.n)]
        assert output.tokens == dict(enumerate(firsts))
        assert output.end.handed_off == bool(self.firsts(prompt, params))
        if output.of(PrefillFinished):
            assert output.of(PrefillFinished)[0].first == self.firsts(prompt, params)

    def check_handed_on(
        self, key: str, prompt: npt.NDArray[np.uint32], params: SamplingParams
    ) -> None:
        """A request under way was prefilled again: one more token, then all of it is offered."""
        output, start = self.rig.outputs[key], len(self.started[key])
        expected = self.expected(prompt, params, 0)
        assert output.tokens == {0: expected[start : start + 1]}
        assert output.end.handed_off == (len(expected) > start + 1)
        if output.end.handed_off:
            (offer,) = output.of(OfferReady)
            assert list(offer.generated) == expected[: start + 1]
            assert offer.num_tokens == len(prompt) + start

    # -- helpers ---------------------------------------------------------------------------

    _expected: dict[tuple[bytes, SamplingParams, int], list[int]] = {}  # noqa: RUF012 a cache

    def expected(
        self, prompt: npt.NDArray[np.uint32], params: SamplingParams, choice: int
    ) -> list[int]:
        where = (prompt.tobytes(), params, choice)
        if where not in self._expected:
            self._expected[where] = reference_tokens(
                prompt, params, choice=choice, eos_token_ids=(EOS,)
            )
        return self._expected[where]

    def firsts(
        self, prompt: npt.NDArray[np.uint32], params: SamplingParams
    ) -> tuple[FirstToken, ...]:
        every = [self.expected(prompt, params, choice) for choice in range(params.n)]
        return tuple(
            FirstToken(choice, tokens[0]) for choice, tokens in enumerate(every) if len(tokens) > 1
        )

    def end_receive(self, key: str) -> None:
        self.rig.receive(key, self.newest(key), self.forms[key])

    def newest(self, key: str) -> tuple[FirstToken, ...]:
        prompt, params, _ = self.sent[key]
        generated = self.started[key]
        return (FirstToken(0, generated[-1]),) if generated else self.firsts(prompt, params)

    def is_ending(self, key: str) -> bool:
        return self.rig.outputs[key].num_ends > 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
