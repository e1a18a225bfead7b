"""The logical request: what the client gets, whatever workers, attempts and Links it took.

Pure. Each token index of each choice is taken once; text and stop strings live here; what a
worker made beyond a stop string or the limit is neither sent nor counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from services.common.errors import RequestError
from services.router.api import ChoiceDelta, ChoiceEnd, GenerateCall, RouterOutput, TextLogprob
from services.text.detokenizer import SupportsTextBytes
from services.text.output import ChoiceText

# Tokens of one choice that overtook an earlier one on another Link, whose worker may stand still
# for as long as a Link is given before it is cut.
MAX_PENDING_TOKENS = 4096


class TokenText(SupportsTextBytes, Protocol):
    """What the router needs of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes, special tokens included."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprobs of one token as a worker reports them."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokensIn(NamedTuple):
    """New tokens of one choice as they came from a worker."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def end_index(self) -> int:
        """Index after the last of them."""
        return self.first_index + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What the client has of a choice that is not over."""

    choice: int
    token_ids: tuple[int, ...]


class PlainChoice(NamedTuple):
    """An only choice whose next tokens are text and nothing else, as long as each has a text."""

    token_ids: array[int]  # forwarded; whoever forwards the next one adds it
    end_index: int  # of the longest answer
    text_of: Callable[[int], str | None]


@dataclass(slots=True)
class _Choice:
    index: int
    text: ChoiceText
    token_ids: array[int] = field(default_factory=lambda: array("I"))  # forwarded
    num_cut: int = 0  # of them: beyond a stop string, and not billed
    end_reason: str | None = None  # a worker said so; applies once nothing is missing
    is_over: bool = False

    @property
    def next_index(self) -> int:
        """First index not forwarded."""
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Billed."""
        return len(self.token_ids) - self.num_cut


class LogicalRequest:
    """Token, text and end state of every choice of one request."""

    def __init__(
        self, call: GenerateCall, token_text: TokenText, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._max_tokens = call.sampling.max_tokens
        self._min_tokens = call.sampling.min_tokens
        eos = () if call.sampling.ignore_eos else eos_token_ids
        self._stop_ids = frozenset((*eos, *call.sampling.stop_token_ids))
        self._token_text = token_text
        min_tokens = call.sampling.min_tokens
        self._choices = [
            _Choice(index, ChoiceText(token_text, call.stop, min_tokens))
            for index in range(call.sampling.n)
        ]
        self._pending: dict[tuple[int, int], tuple[int, TokenLogprob | None]] = {}

    # -- questions ---------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_over for choice in self._choices)

    @property
    def has_output(self) -> bool:
        """Whether any token was taken: from then on the answer cannot start anew unseen."""
        return any(choice.token_ids for choice in self._choices)

    @property
    def has_first_tokens(self) -> bool:
        """Whether every choice has its first token: prefill owes nothing more."""
        return all(choice.token_ids for choice in self._choices)

    @property
    def completion_tokens(self) -> int:
        """Tokens billed, of all choices."""
        return sum([len(choice.token_ids) - choice.num_cut for choice in self._choices])

    @property
    def num_choices(self) -> int:
        """Return n."""
        return len(self._choices)

    @property
    def so_far(self) -> tuple[ChoiceSoFar, ...]:
        """What the client has of each choice that goes on; empty before the first token."""
        if not self.has_output:
            return ()
        return tuple(
            ChoiceSoFar(choice.index, tuple(choice.token_ids))
            for choice in self._choices
            if not choice.is_over
        )

    @property
    def next_indexes(self) -> tuple[int, ...]:
        """Per choice: the first index the client does not have."""
        return tuple([len(choice.token_ids) for choice in self._choices])

    def has_all_ends(self) -> bool:
        """Whether a worker has ended every choice, even if tokens before the end are missing."""
        return all(c.is_over or c.end_reason is not None for c in self._choices)

    def plain(self) -> PlainChoice | None:
        """Return the only choice if the next tokens of it need no look at anything but their text.

        Good until another method changes anything.
        """
        if len(self._choices) != 1 or self._pending:
            return None
        (choice,) = self._choices
        if choice.is_over or choice.end_reason is not None or not choice.text.is_plain:
            return None
        return PlainChoice(choice.token_ids, self._max_tokens, self._token_text.whole_text)

    # -- events ------------------------------------------------------------------------------

    def take_tokens(self, tokens: TokensIn) -> list[RouterOutput]:
        """Take tokens in whatever order; return what can be forwarded now.

        Raises:
            RequestError: a worker sent what makes no sense; the request cannot go on.
        """
        choice_idx, first_index, run, logprobs = tokens
        if choice_idx >= len(self._choices):
            raise RequestError("internal", "a worker sent tokens of a choice that does not exist")
        if logprobs and len(logprobs) != len(run):
            raise RequestError("internal", "a worker sent logprobs that do not match its tokens")
        choice = self._choices[choice_idx]
        if choice.is_over:
            return []
        skip = choice.next_index - first_index
        if skip < 0:
            self._hold(choice, tokens)
            return []
        if skip:
            run, logprobs = run[skip:], logprobs[skip:]
        if self._pending:
            run, logprobs = self._with_held(choice, run, logprobs)
        # A worker that restarted its budget must not lengthen the answer.
        run = run[: self._max_tokens - choice.next_index]
        if not run:
            return []
        outputs = self._forward(choice, run, logprobs)
        if choice.end_reason is not None:
            outputs += self._finish_if_complete(choice)
        return outputs

    def end_choice(self, choice_idx: int, finish_reason: str) -> list[RouterOutput]:
        """A worker ended a choice; it is over once all its tokens are here."""
        if choice_idx >= len(self._choices):
            raise RequestError("internal", "a worker ended a choice that does not exist")
        choice = self._choices[choice_idx]
        if choice.is_over:
            return []
        choice.end_reason = finish_reason
        return self._finish_if_complete(choice)

    def rewind(self) -> list[RouterOutput]:
        """Forget what a lost worker said and cannot complete; the client's tokens stand.

        A choice whose last token ends it is over, whether or not the worker came to say so.
        """
        outputs: list[RouterOutput] = []
        for choice in self._choices:
            if choice.is_over:
                continue
            self._drop_pending(choice, None)
            choice.end_reason = self._reason_to_end(choice)
            outputs += self._finish_if_complete(choice)
        return outputs

    # -- inside ------------------------------------------------------------------------------

    def _reason_to_end(self, choice: _Choice) -> str | None:
        """Say why nothing follows the tokens that are here, as a worker would."""
        num_tokens = choice.next_index
        if num_tokens and num_tokens >= self._min_tokens and choice.token_ids[-1] in self._stop_ids:
            return "stop"
        return "length" if num_tokens >= self._max_tokens else None

    def _hold(self, choice: _Choice, tokens: TokensIn) -> None:
        """Keep tokens that overtook: decode may be heard before prefill's first token is."""
        for offset, token_id in enumerate(tokens.token_ids):
            logprob = tokens.logprobs[offset] if tokens.logprobs else None
            self._pending[(choice.index, tokens.first_index + offset)] = (token_id, logprob)
        is_beyond = tokens.first_index > self._max_tokens
        if is_beyond or len(self._pending) > MAX_PENDING_TOKENS * len(self._choices):
            raise RequestError("internal", "a worker's tokens ran ahead of their predecessors")

    def _with_held(
        self, choice: _Choice, run: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Add the tokens that overtook these."""
        ids, entries = list(run), list(logprobs)
        while self._pending:
            held = self._pending.pop((choice.index, choice.next_index + len(ids)), None)
            if held is None:
                break
            ids.append(held[0])
            if held[1] is not None:
                entries.append(held[1])
        return tuple(ids), tuple(entries)

    def _forward(
        self, choice: _Choice, run: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> list[RouterOutput]:
        text, stop, num_counted = choice.text.push(run)
        counted = run[:num_counted]
        shown: tuple[TextLogprob, ...] = ()
        if logprobs:
            shown = tuple([self._text_logprob(entry) for entry in logprobs[: len(counted)]])
        new = ChoiceDelta(choice.index, choice.next_index, counted, text, shown)
        choice.token_ids.extend(run)
        choice.num_cut += len(run) - num_counted
        if self._pending:
            self._drop_pending(choice, choice.next_index)
        if stop is None:
            return [new]
        return [new, self._end(choice, "stop", stop)]

    def _finish_if_complete(self, choice: _Choice) -> list[RouterOutput]:
        if choice.is_over or choice.end_reason is None or self._is_gapped(choice):
            return []
        delta = choice.text.finish()
        end = self._end(choice, "stop" if delta.stop else choice.end_reason, delta.stop)
        if not delta.text:
            return [end]
        return [ChoiceDelta(choice.index, choice.next_index, (), delta.text), end]

    def _is_gapped(self, choice: _Choice) -> bool:
        return bool(self._pending) and any(index == choice.index for index, _ in self._pending)

    def _drop_pending(self, choice: _Choice, below: int | None) -> None:
        """Forget held tokens of a choice: all, or those that came another way meanwhile."""
        if not self._pending:
            return
        for key in [k for k in self._pending if k[0] == choice.index]:
            if below is None or key[1] < below:
                del self._pending[key]

    def _end(self, choice: _Choice, reason: str, stop: str | None) -> ChoiceEnd:
        choice.is_over = True
        self._drop_pending(choice, None)
        return ChoiceEnd(choice.index, reason, stop, choice.num_tokens)

    def _text_logprob(self, entry: TokenLogprob) -> TextLogprob:
        raw = self._token_text.token_bytes(entry.token_id)
        top = []
        for token_id, logprob in entry.top:
            top_raw = self._token_text.token_bytes(token_id)
            top.append((token_id, top_raw.decode("utf-8", "replace"), top_raw, logprob))
        return TextLogprob(
            entry.token_id, raw.decode("utf-8", "replace"), raw, entry.logprob, tuple(top)
        )
