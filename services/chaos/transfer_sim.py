"""Deterministic simulator of the transfer protocol: one seed is one run, every run ends at rest.

The state machines, pools, prefix caches, tickets, handshake, codec, credit, conversion and block
writer are the real ones; only sockets, threads and the model are played. After every event the
pools are counted, and at rest nothing may be held; see `Violation` for what ends a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.chaos.sim_decode import DecodeWorker, Group, Ticketed
from services.chaos.sim_network import Network
from services.chaos.sim_prefill import Offer, PrefillWorker, Prompt, Request
from services.chaos.sim_world import SHAPES, Family, Odds, Violation, Worker, World

TRANSFERS_A_RUN = 100
_MAX_ATTEMPTS = 3
_MAX_BLOCKS = 7
_CANCEL_LOST = 0.1
_LENGTHS = (5, 16, 23, 40, 48, 64, 77, 100, 112)
_EVENTS_A_TRANSFER = 2_000
_CALM = Odds()
# Weather of a run: every seed has one, so that rare endings come often enough to be checked.
PROFILES: tuple[Odds, ...] = (
    _CALM,
    replace(_CALM, drop=0.03, corrupt=0.03, duplicate=0.04, delay=0.04, reorder=0.06),
    replace(_CALM, crash=0.03, freeze=0.02, break_link=0.04, lose_plane=0.06),
    replace(_CALM, cut=0.06, freeze=0.04, slow_sender=0.2, torn=0.5, decode_wait=0.3, pressure=0.8),
    # Leases run out while their holder reads: only generations stand between it and other KV.
    replace(_CALM, cut=0.3, freeze=0.1, slow_reader=0.4, decode_wait=0.4, pressure=3.0, unpin=0.2),
    replace(_CALM, cancel=0.4, race=0.2, pressure=1.5, decode_wait=0.2, torn=0.3, unpin=0.2),
)


@dataclass(frozen=True, slots=True)
class RunReport:
    """What one run did; `violation` is None when every promise held."""

    seed: int
    num_transfers: int
    num_events: int
    stats: Counter[str]
    log: tuple[str, ...]
    violation: str | None


def run_seed(seed: int, num: int = TRANSFERS_A_RUN, *, record: bool = False) -> RunReport:
    """Play one run of `num` transfers; the same arguments give the same run, to the byte.

    A smaller `num` plays the same run and stops sending prompts earlier.
    """
    profile, shape = PROFILES[seed % len(PROFILES)], SHAPES[seed % len(SHAPES)]
    world = World(seed, profile, record=record, shape=shape)
    cluster = Cluster(world, num)
    violation: str | None = None
    try:
        cluster.run()
    except Exception as error:  # a run is the outermost loop: any fault of the code ends it
        violation = f"{type(error).__name__}: {error}"
        world.note("violation", violation)
    return RunReport(
        seed=seed,
        num_transfers=cluster.num_started,
        num_events=world.num_events,
        stats=world.stats,
        log=tuple(world.log or ()),
        violation=violation,
    )


class Cluster:
    """Workers, a router that knows nothing for sure, and a source of faults."""

    def __init__(self, world: World, num: int) -> None:
        self._world = world
        self._num = num
        self.num_started = 0
        self._network = Network(world)
        # Workers whose number has the same parity are on one host, and share memory.
        self.prefills = [PrefillWorker(world, i, self._network, self) for i in range(2)]
        self._decodes = [DecodeWorker(world, i, self._network, self) for i in range(3)]
        self._families: list[Family] = []
        self.prompts: list[Prompt] = []
        self._tickets: dict[int, dict[Request, Ticketed]] = {}

    def run(self) -> None:
        """Play until nothing is left to happen, and look at what is left."""
        self.start()
        self._world.run(_EVENTS_A_TRANSFER * (self._num + 10))
        self.check_at_rest()

    def start(self) -> None:
        """Let the first prompt come."""
        self._world.at(0.0, self._arrive)

    def check_at_rest(self) -> None:
        """Hold everything to what must be true when nothing is left to do."""
        for worker in self.workers():
            if not worker.is_up:
                raise Violation(f"{worker.name} did not come back")
            worker.check_at_rest()
        for request in (request for prompt in self.prompts for request in prompt.requests):
            if request.num_receives or not request.outcome:
                raise Violation(f"request {request.prompt.number} never ended")

    def workers(self) -> list[PrefillWorker | DecodeWorker]:
        return [*self.prefills, *self._decodes]

    # ---- requests -----------------------------------------------------------------------------

    def _arrive(self) -> None:
        world, rng = self._world, self._world.rng
        self.num_started += 1
        number = self.num_started
        if not self._families or rng.random() < 0.4:
            self._families.append(Family.make(world.rng.getrandbits(23), _MAX_BLOCKS))
        prompt = Prompt(
            number=number,
            family=self._families[-1 - rng.randrange(min(4, len(self._families)))],
            num_tokens=rng.choice(_LENGTHS),
            is_slow=rng.random() < world.odds.slow_sender,
            is_at_once=rng.random() < world.odds.at_once,
        )
        self.prompts.append(prompt)
        world.note("router", f"request {number} of {prompt.num_tokens} tokens")
        self._dispatch(prompt)
        if world.happens(world.odds.cancel):
            world.at(rng.random() * rng.choice((0.005, 0.05, 2.0)), self.cancel, prompt)
        self._trouble()
        pause_s = rng.expovariate(250.0)  # drawn in any case: a shorter run is a prefix of a longer
        if number < self._num:
            world.at(pause_s, self._arrive)

    def _dispatch(self, prompt: Prompt) -> None:
        if self._world.shape.is_sharded:
            chosen = self.prefills
        else:
            up = [worker for worker in self.prefills if worker.is_up]
            chosen = [self._world.rng.choice(up or self.prefills)]
        for worker in chosen:
            request = Request(prompt)
            prompt.requests.append(request)
            if worker.is_up:
                self._start(worker, request)
            else:
                request.outcome = "no prefill worker"

    def _start(self, worker: PrefillWorker, request: Request) -> None:
        worker.ask(
            worker.start, request, lost=lambda: self.on_prefill_over(request, "prefill died")
        )

    def cancel(self, prompt: Prompt) -> None:
        """The client left: tell both sides; each message may be lost."""
        prompt.is_cancelled = True
        self._world.stats["cancels"] += 1
        self._world.note("router", f"cancel {prompt.number}")
        for worker in self.workers():
            if not self._world.happens(_CANCEL_LOST):
                worker.at(self._world.rng.random() * 0.002, worker.cancel, prompt)

    def on_ticket(self, worker: PrefillWorker, offer: Offer, signed: bytes) -> None:
        """KV can be pulled: choose who pulls, once every shard has something to be pulled."""
        request, prompt = offer.request, offer.request.prompt
        if prompt.is_cancelled and self._world.happens(0.5):
            return
        tickets = self._tickets.setdefault(prompt.number, {})
        tickets[request] = Ticketed(request, worker, worker.incarnation, offer.xfer_id, signed)
        if len(tickets) < len(prompt.requests):
            return
        self._open(prompt)
        if self._world.happens(self._world.odds.race):
            self._world.stats["races"] += 1
            again = self._world.happens(0.5)
            self._world.at(self._world.rng.random() * 0.02, self._open, prompt, not again)

    def _open(self, prompt: Prompt, is_new_attempt: bool = True) -> None:
        """Send the tickets to a decode worker."""
        up = [worker for worker in self._decodes if worker.is_up]
        if not up:
            return
        prompt.attempt += is_new_attempt
        worker = self._world.rng.choice(up)
        tickets = [t for t in self._tickets[prompt.number].values() if worker.overlaps(t.prefill)]
        for ticket in tickets:
            ticket.request.num_receives += 1
        worker.ask(
            worker.open, prompt, tickets, prompt.attempt, lost=lambda: self._not_opened(tickets)
        )

    def _not_opened(self, tickets: Sequence[Ticketed]) -> None:
        for ticket in tickets:
            self.on_received(ticket.request)

    def on_prefill_over(self, request: Request, outcome: str) -> None:
        """Its blocks were given back, or none were ever lent."""
        if request.outcome:
            raise Violation(f"request {request.prompt.number} ended twice at the prefill side")
        request.outcome = outcome

    def on_received(self, request: Request) -> None:
        """One receive is over."""
        request.num_receives -= 1

    def on_group_failed(self, group: Group) -> None:
        """Try another decode worker, or let decode compute the prompt itself."""
        prompt = group.prompt
        can_retry = group.can_recompute and group.failure != "fenced"
        if not can_retry or prompt.attempt >= _MAX_ATTEMPTS or prompt.is_cancelled:
            return
        if self._world.happens(0.6):
            self._world.stats["retries"] += 1
            self._world.at(self._world.rng.random() * 0.01, self._open, prompt)

    # ---- faults -------------------------------------------------------------------------------

    def _trouble(self) -> None:
        """Draw what else happens around the time of an arrival."""
        world, odds = self._world, self._world.odds
        faults: tuple[tuple[float, Callable[[], None]], ...] = (
            (odds.crash, self._crash),
            (odds.cut, self._cut),
            (odds.break_link, self._break),
            (odds.freeze, self._freeze),
            (odds.clock_step, self._step_clock),
            (odds.pressure, self._press),
            (odds.unpin, self._unpin),
            (odds.lose_plane, self._lose_plane),
        )
        for chance, fault in faults:
            if world.happens(chance):
                world.at(world.rng.random() * 0.03, fault)

    def _crash(self) -> None:
        worker = self._world.rng.choice(self.workers())
        if not worker.is_up:
            return
        incarnation = worker.incarnation
        worker.crash()
        if isinstance(worker, PrefillWorker):
            self._break_links_to(worker, incarnation)
        else:
            self._tell_prefills(worker, incarnation)
        self._world.at(self._world.rng.random() * 0.1, worker.boot)

    def _break_links_to(self, worker: PrefillWorker, incarnation: int) -> None:
        for decode in self._decodes:
            for link in list(decode.links.values()):
                if link.prefill is worker and link.prefill_incarnation == incarnation:
                    is_mapped = link.plane == "memfd"
                    decode.at(0.0005, lambda d=decode, k=link, m=is_mapped: d.lose(k, is_dead=m))

    def _tell_prefills(self, worker: Worker, incarnation: int) -> None:
        for prefill in self.prefills:
            for link in prefill.links.values():
                if link.decode is worker and link.decode_incarnation == incarnation:
                    link.is_up = False
                    prefill.at(0.001, prefill.peer_lost, link.peer.base)

    def _cut(self) -> None:
        rng = self._world.rng
        ends: list[Worker] = [rng.choice(self.prefills), rng.choice(self._decodes)]
        rng.shuffle(ends)
        seconds = rng.choice((0.05, 1.0, 3.0, 9.0)) * rng.random()
        self._network.cut(ends[0], ends[1], seconds)
        if rng.random() < 0.5:
            self._network.cut(ends[1], ends[0], seconds)

    def _break(self) -> None:
        rng = self._world.rng
        decode = rng.choice(self._decodes)
        if not decode.is_up or not decode.links:
            return
        link = rng.choice(list(decode.links.values()))
        decode.at(0.0, lambda: decode.lose(link, is_dead=False))
        if rng.random() < 0.5 and link.prefill.incarnation == link.prefill_incarnation:
            # Word of the old connection may come when a new one is in use.
            link.prefill.at(rng.random() * 0.01, link.prefill.peer_lost, link.peer.base)

    def _freeze(self) -> None:
        rng = self._world.rng
        worker = rng.choice(self.workers())
        seconds = rng.choice((0.02, 0.5, 3.5)) * rng.random()
        self._world.stats["freezes"] += 1
        self._world.note(worker.name, f"frozen for {seconds:.3f}s")
        worker.frozen_until = max(worker.frozen_until, self._world.now + seconds)

    def _step_clock(self) -> None:
        """Move the wall clock by up to a day, either way."""
        self._world.stats["clock steps"] += 1
        self._world.wall_ms += self._world.rng.randrange(-86_400_000, 86_400_000)

    def _press(self) -> None:
        worker = self._world.rng.choice(self.workers())
        worker.at(0.0, worker.press, self._world.rng.randrange(1, 20))

    def _unpin(self) -> None:
        worker = self._world.rng.choice(self.prefills)
        worker.at(0.0, worker.unpin_all)

    def _lose_plane(self) -> None:
        decode = self._world.rng.choice(self._decodes)
        if decode.is_up and decode.links:
            link = self._world.rng.choice(list(decode.links.values()))
            decode.at(0.0, decode.lose_plane, link)
