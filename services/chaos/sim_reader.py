"""How a decode worker of the transfer simulator reads KV in a peer's pool, step after step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.chaos.sim_world import Violation, reference
from services.kv.attached import AttachedKv

if TYPE_CHECKING:
    from services.chaos.sim_decode import DecodeWorker, Receive

_STEP_S = 0.01
_SLOW_STEP_S = 2.0
_MAX_STEPS = 12
_MOVED_A_STEP = 1


@dataclass(eq=False, slots=True)
class InPlaceReader:
    """Decodes over attached blocks until it has its answer, or has moved them home.

    What a step computed counts only if no block it read had changed by the end of the step.
    """

    worker: DecodeWorker
    receive: Receive
    kv: AttachedKv
    num_steps: int = 0  # still to do
    num_moved: int = 0
    goes_home: bool = False  # the answer is long enough for that
    is_urgent: bool = False
    is_over: bool = False

    def begin(self) -> None:
        """Decode for a while."""
        rng = self.worker.world.rng
        self.num_steps = rng.randrange(1, _MAX_STEPS)
        self.goes_home = rng.random() < 0.3
        self.worker.at(_STEP_S, self._step)

    def move_in(self) -> None:
        """The peer wants its blocks back, or is gone: go home soon."""
        self.is_urgent = True

    def stop(self) -> None:
        """Nobody wants the answer any more."""
        if not self.is_over:
            self._end(is_intact=self.kv.is_current(self.num_moved))

    def _step(self) -> None:
        if self.is_over:
            return
        world = self.worker.world
        is_right = self._is_right()
        if world.happens(world.odds.torn):
            self.worker.let_owner_work(self.receive)
        if not self.kv.is_current(self.num_moved):
            world.stats["steps thrown away"] += 1
            self._end(is_intact=False)
            return
        if not is_right:
            raise Violation(f"{self.worker.name}: a step counts that read wrong content in place")
        world.stats["steps in place"] += 1
        self.num_steps -= 1
        if (self.is_urgent or self.goes_home) and not self._move():
            self._end(is_intact=False)
        elif self.num_moved == len(self.kv):
            world.stats["moved home"] += 1
            self._end(is_intact=True)
        elif self.num_steps <= 0 and not self.is_urgent:
            world.stats["answered in place"] += 1
            self._end(is_intact=True)
        else:
            is_slow = world.happens(world.odds.slow_reader)
            longest_s = _SLOW_STEP_S if is_slow else _STEP_S
            self.worker.at(world.rng.random() * longest_s, self._step)

    def _is_right(self) -> bool:
        prompt, pool = self.receive.group.prompt, self.kv.pool
        return all(
            pool.blocks[block].tobytes() == reference(prompt.name_of(index), self.worker.turns)
            for index, block in list(zip(self.kv.indexes, self.kv.blocks, strict=True))[
                self.num_moved :
            ]
        )

    def _move(self) -> bool:
        """Bring the next blocks home; False if one has changed."""
        homes, memory = self.receive.group.blocks, self.worker.memory
        for _ in range(min(_MOVED_A_STEP, len(self.kv) - self.num_moved)):
            dest = homes[self.kv.indexes[self.num_moved]]
            verify = self.kv.verifies_moves
            if not self.kv.copy_home(self.num_moved, memory, dest, verify=verify):
                self.worker.world.stats["moves refused"] += 1
                return False
            self.num_moved += 1
        return True

    def _end(self, *, is_intact: bool) -> None:
        self.is_over = True
        is_home = self.num_moved == len(self.kv)
        self.worker.on_detached(self.receive, is_intact=is_intact, is_home=is_home)
