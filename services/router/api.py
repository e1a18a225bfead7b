"""The logical request as the gateway hands it to the router, and what comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from services.common.ids import RequestId
from services.common.light_value import light_value
from services.common.sampling import SamplingParams

# Writes the text of one token; False when that is not possible now, and nothing was written.
TextWriter = Callable[[str], bool]


class OutputSink(Protocol):
    """Takes new output at once, where somebody can; see services.router.output_sink."""

    def push(self, output: ChoiceDelta) -> bool:
        """Take a delta; False leaves it to the iterator. Must not block."""
        ...

    def writer(self) -> TextWriter | None:
        """Give what writes further text of the only choice, past `push`; None = not now.

        Good until the next delta or end that is not written by it. Whoever writes has to `note`.
        """
        ...

    def note(self, times: Sequence[float]) -> None:
        """Hear when tokens were written by `writer`, one each."""
        ...


@light_value
class GenerateCall:
    """A validated, tokenised request. Times are monotonic seconds."""

    request_id: RequestId
    model: str
    token_ids: npt.NDArray[np.uint32]  # the prompt, at least one
    sampling: SamplingParams  # seed, max_tokens and n always set
    stop: tuple[str, ...]
    deadline: float
    received_at: float  # before parsing and tokenising
    priority: int = 0
    tenant: str = ""
    namespace: str = ""  # the tenant's name in block hashes; workers learn no other
    force_mode: str | None = None  # "REMOTE" | "LOCAL" | "STAY"
    slo_ttft_ms: int = 0  # what the client calls good; 0 = it did not say
    slo_tpot_ms: int = 0
    traceparent: str = ""
    session: str = ""  # breaks ties between workers, no more
    sink: OutputSink | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """Logprobs of one token with its text; `raw` keeps bytes that are not valid UTF-8 alone."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()


class ChoiceDelta(NamedTuple):
    """New output of one choice. `text` may be empty while UTF-8 or a stop string is pending.

    A tuple, which takes a quarter of the time of a frozen dataclass: one is made for every token.
    """

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TextLogprob, ...] = ()


@light_value
class ChoiceEnd:
    """One choice is complete. finish_reason: "stop" | "length"."""

    choice: int
    finish_reason: str
    stop: str | None = None  # the stop string that matched
    num_tokens: int = 0  # generated, and billed


@light_value
class RequestTiming:
    """Stage times in microseconds, as in Timing of common.proto, and where the request ran."""

    router_us: int = 0
    queue_us: int = 0  # waited in the router, for room or for a worker
    queue_prefill_us: int = 0
    prefill_us: int = 0
    handoff_us: int = 0
    handoff_bytes: int = 0
    queue_decode_us: int = 0
    decode_us: int = 0
    unattributed_us: int = 0
    ttft_us: int = 0
    e2e_us: int = 0
    mode: str = ""
    reason: str = ""  # why that mode
    plane: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    migrations: int = 0
    migration_gap_us: int = 0  # the longest gap between two tokens that a migration made
    prefill_chunks: int = 0
    recomputed: bool = False  # decode could not have the KV and computed the prompt itself
    handoff_blocks: int = 0
    handoff_blocks_deduped: int = 0
    handoff_blocks_attached: int = 0  # read where prefill had them
    migration_us: int = 0  # a stage: KV on its way between decode workers
    migration_bytes: int = 0  # of all migrations together, as the next two
    migration_blocks: int = 0
    migration_blocks_attached: int = 0
    migration_plane: str = ""  # of the last one
    routed_locally: bool = False  # the store had no part in the decision


@light_value
class RequestEnd:
    """The request is over; always the last output of a request that did not fail."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # all choices
    timing: RequestTiming = field(default_factory=RequestTiming)


RouterOutput = ChoiceDelta | ChoiceEnd | RequestEnd
# Takes all that is there for a client, in order: what comes at once can leave in one message.
WriteOutputs = Callable[[Sequence[RouterOutput]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the cluster serves; filled from the model directory the router was started with."""

    name: str
    context_length: int
    vocab_size: int
    weights_digest: str
    eos_token_ids: tuple[int, ...]
    max_pool_tokens: int  # largest request any live worker's pool could hold; 0 = no worker yet


class RouterPort(Protocol):
    """What the front doors need of the router."""

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        """Run a request and write its outputs; being cancelled ends it. Raises IsthmusError."""
        ...

    def served_models(self) -> tuple[ServedModel, ...]:
        """Models of this cluster."""
        ...

    def is_ready(self) -> tuple[bool, str]:
        """Whether requests would be served now, and why not."""
        ...

    @property
    def is_degraded(self) -> tuple[bool, str]:
        """Whether requests are routed without hints and the others' choices, and why."""
        ...
