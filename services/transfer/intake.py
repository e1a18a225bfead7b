"""Blocks on their way in: turns of pulling, credit for DATA, and the verdict on each block."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.pb import transfer_pb2 as pb
from services.runtime.threads import available_cores
from services.telemetry.logs import get_logger
from services.transfer import codec
from services.transfer.block_writer import BlockWriter
from services.transfer.config import MAX_COPY_THREADS, MIB
from services.transfer.counters import SinkCounters
from services.transfer.credit import CreditRound
from services.transfer.end_parts import EndParts
from services.transfer.fault_plane import open_copier
from services.transfer.peer_link import PeerLink
from services.transfer.receive import Receive
from services.transfer.receive_table import ReceiveTable
from services.transfer.receiver import Pull, ReceiverAction
from services.transfer.values import U64Array
from services.transfer.wire import Message, MessageType
from services.transfer.zmq_plane import Block

log = get_logger(__name__)

_PULL_SLICE_S = 0.004  # then commands and messages are looked at
_STEP_BYTES = 32 * MIB  # copied between two looks at the time: some 3 ms
_ANSWERED_TOGETHER = 2  # DATA messages: each answer wakes two threads on both sides
_STEP_BLOCKS = 64  # and not more of them, however small

Apply = Callable[[Receive, Sequence[ReceiverAction]], None]


class Frames(Protocol):
    """Payload that has come, one frame after the other."""

    def recv_block(self, block: Block) -> bool:
        """Write the next frame into a block; False if it has another length."""
        ...

    def skip_block(self) -> None:
        """Leave the next frame out."""
        ...


class Intake:
    """The only code that writes blocks for a peer; belongs to the sink's thread."""

    def __init__(
        self,
        parts: EndParts,
        counters: SinkCounters,
        receives: ReceiveTable,
        apply: Apply,
    ) -> None:
        config = parts.config
        self._layout: KvLayout = parts.layout
        self._config = config
        self._clock = parts.clock
        self._faults = parts.faults
        self._counters = counters
        self._receives = receives
        self._apply = apply
        self._writer = BlockWriter(
            parts.memory,
            parts.layout,
            config.digest_sampling,
            open_copier(config),
            config.copy_threads or min(MAX_COPY_THREADS, available_cores()),
        )
        self.copy_cpu_s = 0.0  # of this thread, copying and verifying so far
        self._hungry: OrderedDict[Receive, None] = OrderedDict()  # for credit
        self._pulling: OrderedDict[Receive, None] = OrderedDict()
        self._pulls_a_step = min(_STEP_BLOCKS, max(1, _STEP_BYTES // parts.layout.block_bytes))
        self._answer_bytes = _ANSWERED_TOGETHER * config.data_message_bytes
        self._unsaid: OrderedDict[Receive, None] = OrderedDict()  # of their blocks no PULLED tells

    @property
    def has_pulls(self) -> bool:
        """Tell whether there is something to copy at once."""
        return bool(self._pulling)

    def queue(self, receive: Receive) -> None:
        """Note that a receive may have work."""
        if receive.machine.has_pulls():
            self._pulling[receive] = None
        if receive.machine.credit_wanted():
            self._hungry[receive] = None

    def drop(self, receive: Receive) -> None:
        """Forget the work of a receive that has ended."""
        self._hungry.pop(receive, None)
        self._pulling.pop(receive, None)
        self._unsaid.pop(receive, None)

    def on_data(self, link: PeerLink, receive: Receive, message: Message) -> None:
        """Take the blocks of a DATA message off the socket."""
        self.on_frames(link, receive, link.dealer, message.body, message.header.n_payload)

    def on_frames(
        self, link: PeerLink, receive: Receive, frames: Frames, data: bytes, num_frames: int
    ) -> None:
        """Take frames, wherever they have come to; `data` says what they are."""
        machine = receive.machine
        indexes = codec.data_indexes(data, num_frames, machine.num_blocks)
        digests = self._frame_digests(receive, data, num_frames)
        machine.account(num_frames)
        link.last_data = self._clock.now()
        good: list[int] = []
        bad: list[tuple[int, str]] = []
        for at, index in enumerate(indexes):
            dest = machine.dest_of(index)
            if dest is None:
                # Late, duplicate, or the transfer is over: never into a block of the pool.
                frames.skip_block()
                self._counters.discarded_frames += 1
                continue
            recv, conversion = frames.recv_block, receive.conversion
            if conversion is None:
                wrong = self._writer.receive(machine, index, dest, recv)
            else:
                own = None if digests is None else digests[at]
                wrong = self._writer.receive_converted(machine, conversion, index, recv, own)
            self._faults.hit("mid_pull")  # written and judged, not yet known to the receive
            if wrong is None:
                good.append(index)
            else:
                bad.append((index, wrong))
        self._judged(receive, good, bad)
        if machine.credit_wanted():
            self._hungry[receive] = None

    def _judged(
        self, receive: Receive, good: Sequence[int], bad: Sequence[tuple[int, str]]
    ) -> None:
        """Tell a receive of the blocks that are written now, and of those that came wrong."""
        if good:
            self._counters.blocks += len(good)
            receive.pulled.extend(good)
            self._unsaid[receive] = None  # before what follows, which may end the receive
            self._apply(receive, receive.machine.on_good_blocks(good, self._clock.now()))
        for index, wrong in bad:
            self._on_wrong(receive, index, wrong)

    def _frame_digests(self, receive: Receive, data: bytes, num_frames: int) -> U64Array | None:
        """Return the digests a DATA message brings of its frames, if their dtype is converted."""
        conversion = receive.conversion
        if conversion is None or not conversion.has_wire_digests:
            return None
        return codec.data_digests(data, num_frames, conversion.wire.digests_per_block)

    def pull_some(self) -> None:
        """Copy for a slice of time; receives take turns."""
        end = self._clock.now() + _PULL_SLICE_S
        while self._pulling:
            receive, _ = self._pulling.popitem(last=False)
            self._pull_step(receive)
            if receive.machine.has_pulls():
                self._pulling[receive] = None  # to the back
            if self._clock.now() >= end:
                return

    def say_pulled(self) -> None:
        """Send PULLED for what is verified, soon: memory may be short at the peer."""
        for receive in list(self._unsaid):
            said_later = len(receive.pulled) * self._layout.block_bytes < self._answer_bytes
            if said_later and receive.machine.outstanding_bytes:
                continue  # with what is on its way
            for lo, hi in _ranges(receive.pulled):
                receive.send(MessageType.PULLED, pb.Pulled(lo=lo, hi=hi).SerializeToString())
            receive.pulled.clear()
            del self._unsaid[receive]

    def grant_credit(self) -> None:
        """Let peers send what fits into the windows."""
        if not self._hungry:
            return
        config = self._config
        round_ = CreditRound(
            block_bytes=self._layout.block_bytes,
            window_bytes=config.window_bytes,
            budget_bytes=config.receive_budget_bytes,
            chunk_bytes=self._answer_bytes,
            used=self._receives.outstanding_bytes(),
        )
        for receive in list(self._hungry):
            wanted = receive.machine.credit_wanted()
            if wanted == 0:
                del self._hungry[receive]
                continue
            size = round_.grant(receive.target, wanted, receive.machine.frame_bytes)
            if size:
                self._apply(receive, receive.machine.grant(size, self._clock.now()))

    def _pull_step(self, receive: Receive) -> None:
        pool, machine = receive.pool, receive.machine
        if pool is None:
            return
        pulls = machine.take_pulls(self._pulls_a_step)
        if any(pull.in_place for pull in pulls):
            self._verify_in_place(receive, pool, [pull for pull in pulls if pull.in_place])
            pulls = [pull for pull in pulls if not pull.in_place]
        if not pulls:
            return
        started, cpu_s = self._clock.now(), time.thread_time()
        if receive.conversion is None:
            verdicts = self._writer.pull(machine, pool, pulls, receive.copy)
        else:
            convert, copy = receive.conversion, receive.copy
            verdicts = self._writer.pull_converted(machine, convert, pool, pulls, copy)
        receive.copy_s += self._clock.now() - started
        self.copy_cpu_s += time.thread_time() - cpu_s
        self._faults.hit("mid_pull")  # written and judged, not yet known to the receive
        judged = list(zip(pulls, verdicts, strict=True))
        good = [pull.index for pull, wrong in judged if wrong is None]
        bad = [(pull.index, wrong) for pull, wrong in judged if wrong is not None]
        self._judged(receive, good, bad)

    def _verify_in_place(self, receive: Receive, pool: KvPoolMemory, pulls: Sequence[Pull]) -> None:
        machine = receive.machine
        verdicts = self._writer.verify_in_place(machine, pool, pulls)
        self._faults.hit("mid_pull")
        good = [p.index for p, wrong in zip(pulls, verdicts, strict=True) if wrong is None]
        self._counters.attached += len(good)
        # No PULLED: the peer must keep what is read there.
        self._apply(receive, machine.on_attached(good, self._clock.now()))
        for pull, wrong in zip(pulls, verdicts, strict=True):
            if wrong is not None:
                self._on_wrong(receive, pull.index, wrong)

    def _on_wrong(self, receive: Receive, index: int, wrong: str) -> None:
        self._counters.integrity_errors += 1
        log.warning(
            "transfer.integrity_error",
            peer=receive.ticket.worker_id,
            reason=wrong,
            plane=receive.plane,
        )
        self._apply(receive, receive.machine.on_block(index, False, self._clock.now(), wrong))


def _ranges(indexes: list[int]) -> list[tuple[int, int]]:
    """Return the ascending runs [lo, hi) that `indexes` are made of."""
    runs: list[tuple[int, int]] = []
    for index in sorted(indexes):
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
