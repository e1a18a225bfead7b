"""What routers and the autoscaler tell each other through the store, and who the autoscaler is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from services.common.errors import StoreUnavailable
from services.registry.answers import items_of, number_of, word_of
from services.registry.schema import Keys
from services.registry.scripts import Arg, Invocation, load_script

WORD_MS = 15_000  # a router that said nothing for so long is gone
MAX_ROUTERS = 1024
# Of a router, of a state, of a status; a longer one is not read. A router that has seen every
# latency of as many workers as it tells of stays below.
MAX_WORD_BYTES = 2 << 20

# A script within so many seconds; raises StoreUnavailable.
Run = Callable[[Invocation, float], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Word:
    """What a router said last, and how long ago by the store's clock."""

    router_id: str
    text: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Brief:
    """What the autoscaler last wrote for routers; JSON."""

    text: str
    is_led: bool  # an autoscaler holds the lease now


@dataclass(frozen=True, slots=True)
class Leadership:
    """The lease is ours. `state` is what the owner before left behind, None for one renewed."""

    token: int
    state: str | None


@dataclass(frozen=True, slots=True)
class Follower:
    """The lease is another's."""

    owner: str
    left_s: float


@dataclass(frozen=True, slots=True)
class ScalingStore:
    """The keys `rt` and `as` of one namespace. Every call has a deadline."""

    keys: Keys
    run: Run
    timeout_s: float = 0.5

    async def tell(self, router_id: str, text: str, now_ms: int | None = None) -> Brief:
        """Say what a router counted, empty when it goes; return what the autoscaler says."""
        args = (router_id, text, WORD_MS, MAX_ROUTERS)
        items = await self._call("tell", ("rt", "as"), args, now_ms)
        brief, until_ms = word_of(items[1]), number_of(items[2])
        return Brief(brief[:MAX_WORD_BYTES], until_ms >= number_of(items[0]))

    async def told(self, now_ms: int | None = None) -> tuple[Word, ...]:
        """Return every router's last word."""
        now, *pairs = await self._call("told", ("rt",), (WORD_MS,), now_ms)
        words = []
        for router, packed in zip(pairs[::2], pairs[1::2], strict=False):
            at_ms, _, text = word_of(packed).partition(" ")
            if at_ms.isdigit() and len(text) <= MAX_WORD_BYTES:
                age_s = max(0, number_of(now) - int(at_ms)) / 1000
                words.append(Word(word_of(router), text, age_s))
        return tuple(words)

    async def lead(
        self, owner: str, lease_ms: int, least_token: int, now_ms: int | None = None
    ) -> Leadership | Follower:
        """Take or renew the lease; a `lease_ms` of 0 gives it back."""
        items = await self._call("lead", ("as",), (owner, lease_ms, least_token), now_ms)
        if number_of(items[0]) != 1:
            return Follower(word_of(items[1]), number_of(items[2]) / 1000)
        state = word_of(items[2])
        return Leadership(number_of(items[1]), state[:MAX_WORD_BYTES] or None)

    async def keep(
        self, owner: str, token: int, fields: Mapping[str, str], now_ms: int | None = None
    ) -> bool:
        """Write what the lease's owner keeps; False = the lease is another's by now."""
        script = load_script("keep")
        flat: list[Arg] = [part for pair in fields.items() for part in pair]
        args = (owner, token, "" if now_ms is None else now_ms, *flat)
        call = Invocation(script, (self.keys.prefix + "as",), args)
        answer = items_of(await self.run(call, self.timeout_s))
        return word_of(answer[0]) == "OK"

    async def status(self) -> str:
        """Return what the last tick came to, JSON; empty where no autoscaler has been at work."""
        call = Invocation(load_script("status"), (self.keys.prefix + "as",), ())
        items = items_of(await self.run(call, self.timeout_s))
        return word_of(items[0])[:MAX_WORD_BYTES]

    async def _call(
        self, name: str, keys: tuple[str, ...], args: tuple[Arg, ...], now_ms: int | None
    ) -> list[object]:
        clock: Arg = "" if now_ms is None else now_ms
        names = tuple(self.keys.prefix + key for key in keys)
        call = Invocation(load_script(name), names, (*args, clock))
        answer = list(items_of(await self.run(call, self.timeout_s)))
        least = {"tell": 3, "told": 1, "lead": 3}[name]
        if len(answer) < least:
            raise StoreUnavailable("the store answered a script in an unknown form")
        return answer
