"""What one worker owes one router: unacknowledged output, kept so that a cut Link can resume.

Pure: no gRPC, no clock. The servicer feeds it frames and asks it what to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.engine.api import (
    ChoiceDone,
    Refused,
    RequestKey,
    TokenLogprobs,
    TokensOut,
)
from services.transfer.api import TransferStats

RESUME_GRACE_S = 2.0  # a request outlives its Link by this long
# Per choice. A request whose router lags further is paused: its blocks stay, no token is made.
MAX_UNACKED_TOKENS = 1024
MAX_PAUSE_S = 10.0  # after this the router is taken not to want the request any more
ENDED_KEPT_S = 10.0  # ended requests are remembered for a resume
MAX_ENDED_KEPT = 4096


@dataclass(frozen=True, slots=True)
class TicketOut:
    """A ticket for the router to pass on; with the tokens so far when the request migrates."""

    key: RequestKey
    ticket: bytes
    generated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DoneOut:
    """The end of a choice with what the transfer of its KV did, if one was received."""

    key: RequestKey
    done: ChoiceDone
    is_receiver: bool
    stats: TransferStats | None
    was_recomputed: bool = False  # its KV could not be had


Outgoing = TokensOut | TicketOut | DoneOut | Refused


@dataclass(slots=True)
class Entry:
    """One work item of one router."""

    key: RequestKey
    request: int
    attempt: int
    unacked: dict[int, list[TokensOut]] = field(default_factory=dict)  # choice -> in index order
    num_unacked: int = 0
    acked: dict[int, int] = field(default_factory=dict)  # choice -> highest acknowledged index
    ticket: TicketOut | None = None
    ends: list[DoneOut | Refused] = field(default_factory=list)
    ended_at: float | None = None
    waiting_since: float | None = None  # Link lost, not resumed yet
    paused_since: float | None = None  # its router lags

    @property
    def room(self) -> int:
        """Tokens that may be unacknowledged: each choice brings its own, or n would lag sooner."""
        return MAX_UNACKED_TOKENS * len(self.unacked)


@dataclass(frozen=True, slots=True)
class AttachResult:
    """What to do after a (re-)attach: send again, end as not wanted any more, report as lost."""

    resend: tuple[Outgoing, ...]
    cancel: tuple[RequestKey, ...]
    lost: tuple[int, ...]


class RouterSession:
    """All work items of one router incarnation.

    Invariant: `num_unacked` of an entry equals the tokens in its `unacked` lists.
    """

    def __init__(self, router_id: str, router_incarnation: int) -> None:
        self.router_id = router_id
        self.router_incarnation = router_incarnation
        self._by_request: dict[int, Entry] = {}
        self._by_key: dict[RequestKey, Entry] = {}
        self._fence: dict[int, int] = {}  # request -> highest attempt seen
        self._resumable: list[RequestKey] = []
        self.is_attached = False

    def __len__(self) -> int:
        """Return the number of work items not ended."""
        return sum(1 for entry in self._by_request.values() if entry.ended_at is None)

    def entry(self, key: RequestKey) -> Entry | None:
        """Return the work item of that key, ended ones included while remembered."""
        return self._by_key.get(key)

    def current(self, request: int) -> Entry | None:
        """Return the newest attempt of a request."""
        return self._by_request.get(request)

    # -- admission and fencing -------------------------------------------------------------

    def is_fenced(self, request: int, attempt: int) -> bool:
        """Say whether an equal or higher attempt of this request was already taken."""
        return attempt <= self._fence.get(request, -1)

    def admit(self, key: RequestKey, request: int, attempt: int) -> RequestKey | None:
        """Take a work item; return the key of the lower attempt it fences off.

        That one may have ended by being handed off: nobody pulls what it still lends.
        """
        if self.is_fenced(request, attempt):
            raise ValueError(f"attempt {attempt} of request {request} is fenced")
        previous = self._by_request.get(request)
        entry = Entry(key, request, attempt)
        self._by_request[request] = entry
        self._by_key[key] = entry
        self._fence[request] = attempt
        if previous is None:
            return None
        self._by_key.pop(previous.key, None)
        return previous.key

    # -- output ----------------------------------------------------------------------------

    def record(self, item: Outgoing, now: float) -> bool:
        """Remember an output until it is acknowledged; False: pause the request, it lags."""
        entry = self._by_key.get(item.key)
        if entry is None:
            return True
        if isinstance(item, TokensOut):
            entry.unacked.setdefault(item.choice, []).append(item)
            entry.num_unacked += len(item.token_ids)
            if entry.num_unacked <= entry.room or entry.paused_since is not None:
                return True
            entry.paused_since = now
            return False
        if isinstance(item, TicketOut):
            entry.ticket = item
            return True
        entry.ends.append(item)
        if isinstance(item, Refused) or item.done.all_choices:
            entry.ended_at = now
        return True

    def acknowledge(self, request: int, choice: int, index: int) -> None:
        """Forget tokens of one choice up to and including `index`."""
        entry = self._by_request.get(request)
        if entry is None:
            return
        entry.acked[choice] = max(index, entry.acked.get(choice, -1))
        kept: list[TokensOut] = []
        for tokens in entry.unacked.get(choice, ()):
            rest = after_index(tokens, index)
            entry.num_unacked -= len(tokens.token_ids) - (len(rest.token_ids) if rest else 0)
            if rest is not None:
                kept.append(rest)
        entry.unacked[choice] = kept
        # At half the room: not to pause again at the next token.
        if entry.paused_since is not None and entry.num_unacked <= entry.room // 2:
            entry.paused_since = None
            self._resumable.append(entry.key)

    def take_resumable(self) -> tuple[RequestKey, ...]:
        """Return and forget the paused requests whose router has caught up."""
        keys, self._resumable = tuple(self._resumable), []
        return keys

    # -- link life -------------------------------------------------------------------------

    def attach(self, resume: Mapping[tuple[int, int], tuple[int, ...]]) -> AttachResult:
        """A Link is up; (request, attempt) maps to the next index wanted per choice.

        Another attempt than the one kept here is a lost one: the broken Link took it along.
        """
        self.is_attached = True
        resend: list[Outgoing] = []
        lost: list[int] = []
        for (request, attempt), next_index in resume.items():
            entry = self._by_request.get(request)
            if entry is None or entry.attempt != attempt:
                lost.append(request)
                continue
            entry.waiting_since = None
            resend.extend(self._replay(entry, next_index))
        cancel = tuple(
            entry.key
            for entry in self._by_request.values()
            if (entry.request, entry.attempt) not in resume and entry.ended_at is None
        )
        return AttachResult(tuple(resend), cancel, tuple(lost))

    def _replay(self, entry: Entry, next_index: tuple[int, ...]) -> Iterable[Outgoing]:
        """Everything the router may have missed of one request, in order."""
        for choice, index in enumerate(next_index):
            if index > 0:
                self.acknowledge(entry.request, choice, index - 1)
        ticket = entry.ticket
        if ticket is not None and not ticket.generated:
            yield ticket
        for choice in sorted(entry.unacked):
            yield from entry.unacked[choice]
        if ticket is not None and ticket.generated:  # it is for what follows these tokens
            yield ticket
        yield from entry.ends

    def detach(self, now: float) -> None:
        """The Link is gone; open work items wait for a resume."""
        self.is_attached = False
        for entry in self._by_request.values():
            if entry.ended_at is None and entry.waiting_since is None:
                entry.waiting_since = now

    def sweep(self, now: float) -> tuple[tuple[RequestKey, str], ...]:
        """Forget old ended work items; return those to give up, each with the reason."""
        given_up = []
        for entry in list(self._by_request.values()):
            if entry.ended_at is not None:
                if now - entry.ended_at > ENDED_KEPT_S:
                    self._forget(entry)
            elif (
                entry.waiting_since is not None
                and not self.is_attached
                and now - entry.waiting_since > RESUME_GRACE_S
            ):
                given_up.append((entry.key, "the router did not come back"))
            elif entry.paused_since is not None and now - entry.paused_since > MAX_PAUSE_S:
                given_up.append((entry.key, "the router lags too far behind"))
        ended = [e for e in self._by_request.values() if e.ended_at is not None]
        for entry in ended[: max(0, len(ended) - MAX_ENDED_KEPT)]:
            self._forget(entry)
        return tuple(given_up)

    def _forget(self, entry: Entry) -> None:
        self._by_request.pop(entry.request, None)
        self._by_key.pop(entry.key, None)
        self._fence.pop(entry.request, None)

    def is_idle(self) -> bool:
        """Say whether nothing is remembered and no Link is up."""
        return not self.is_attached and not self._by_request

    def check_integrity(self) -> None:
        """Raise AssertionError when the counters do not match the lists."""
        for request, entry in self._by_request.items():
            assert entry.request == request
            assert self._by_key[entry.key] is entry
            tokens = sum(len(t.token_ids) for ts in entry.unacked.values() for t in ts)
            assert tokens == entry.num_unacked


def after_index(tokens: TokensOut, index: int) -> TokensOut | None:
    """Return the part of a token event after `index`, or None when nothing is left."""
    skip = index + 1 - tokens.first_index
    if skip <= 0:
        return tokens
    if skip >= len(tokens.token_ids):
        return None
    logprobs: tuple[TokenLogprobs, ...] = tokens.logprobs[skip:] if tokens.logprobs else ()
    return TokensOut(
        tokens.key, tokens.choice, tokens.first_index + skip, tokens.token_ids[skip:], logprobs
    )
