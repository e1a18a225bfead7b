"""`isthmus bench second-token`: what a handoff adds to the time between the first two tokens.

Every round sends three requests a prompt length, each with a fresh prompt: one through both pools
(REMOTE) and one through the decode worker alone (LOCAL), in alternating order; their difference
is what the bar is about. A third one, REMOTE and traced, tells where the time goes: recording
spans costs time too, so it stands outside the pair.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from services.bench.local_cluster import LocalCluster
from services.bench.result import Bar, BenchFailed, BenchResult
from services.common.progress import Progress, silent
from services.gateway.wire_names import FORCE_MODE
from services.pb import common_pb2, inference_pb2, inference_pb2_grpc

PROMPT_TOKENS = (512, 1024, 2048)
MAX_TOKENS = 8
CALL_TIMEOUT_S = 300.0
WARM_UP_ROUNDS = 1
BAR_MS, BAR_MS_PER_1K_TOKENS = 6.0, 2.0
SPANS_WITHIN_S = 10.0  # they are written behind the answer
POLL_S = 0.1
STAGES = ("first_token_out", "kv_complete", "decode_starts", "second_token_out")


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request: when its first two tokens came, and what followed."""

    token_ns: tuple[int, int]  # wall clock
    itl_ms: float  # median gap after the second token
    timing: common_pb2.Timing

    @property
    def second_token_ms(self) -> float:
        """Second token minus first."""
        return (self.token_ns[1] - self.token_ns[0]) / 1e6


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one prompt length."""

    remote: Answer
    local: Answer
    stages_ms: Mapping[str, float]  # after the end of the prefill, each to its own end

    @property
    def added_ms(self) -> float:
        """What the second token waits for beyond a single worker."""
        return self.remote.second_token_ms - self.local.second_token_ms


def bar_ms(prompt_tokens: int) -> float:
    """The most a handoff may add."""
    return BAR_MS + BAR_MS_PER_1K_TOKENS * prompt_tokens / 1000


def run(
    model: Path | str,
    prompt_tokens: Sequence[int],
    *,
    rounds: int,
    dtype: str,
    seed: int,
    progress: Progress = silent,
) -> BenchResult:
    """Start 1 prefill and 1 decode worker and measure."""
    load_before = os.getloadavg()[0]
    done: dict[int, list[Round]] = {length: [] for length in prompt_tokens}
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as directory:
        trace_file = Path(directory) / "spans.jsonl"
        settings = {"ISTHMUS_TELEMETRY__TRACE_FILE": str(trace_file)}
        flags = ("--dtype", dtype)
        progress("starting 1 + 1 workers", 0.0)
        with (
            LocalCluster(model, prefill=1, decode=1, flags=flags, settings=settings) as cluster,
            grpc.insecure_channel(cluster.grpc) as channel,
        ):
            client = _Client(channel, trace_file, random.Random(seed))
            for number in range(rounds + WARM_UP_ROUNDS):
                for length in prompt_tokens:
                    progress("sending pairs", number / (rounds + WARM_UP_ROUNDS))
                    measured = client.round(length, local_first=number % 2 == 0)
                    if number >= WARM_UP_ROUNDS:
                        done[length].append(measured)
            cluster.assert_no_blocks_in_use()
    result = result_of(done)
    result.figures["dtype"] = dtype
    result.reference["load_average_before"] = round(load_before, 2)
    result.reference["load_average_after"] = round(os.getloadavg()[0], 2)
    return result


class _Client:
    """Sends requests with prompts nobody has seen."""

    def __init__(self, channel: grpc.Channel, trace_file: Path, rng: random.Random) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._trace_file = trace_file
        self._rng = rng
        listed = self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S)
        self._vocab_size = listed.models[0].vocab_size

    def round(self, prompt_tokens: int, *, local_first: bool) -> Round:
        """Run the pair, then the traced request."""
        modes = ("LOCAL", "REMOTE") if local_first else ("REMOTE", "LOCAL")
        pair = {mode: self._ask(prompt_tokens, mode, self._new_trace()) for mode in modes}
        trace_id = self._new_trace()
        traced = self._ask(prompt_tokens, "REMOTE", trace_id, is_traced=True)
        spans = read_spans(self._trace_file, trace_id)
        return Round(pair["REMOTE"], pair["LOCAL"], stages_of(traced, spans))

    def _new_trace(self) -> str:
        return f"{self._rng.getrandbits(128) | 1:032x}"

    def _ask(
        self, prompt_tokens: int, mode: str, trace_id: str, *, is_traced: bool = False
    ) -> Answer:
        ids = [self._rng.randrange(self._vocab_size) for _ in range(prompt_tokens)]
        body = inference_pb2.GenerateRequest(
            token_ids=np.asarray(ids, dtype="<u4").tobytes(),
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            return_token_ids=True,
        )
        body.sampling.temperature = 0.0
        metadata = (
            (FORCE_MODE.name, mode),
            ("traceparent", f"00-{trace_id}-{trace_id[:16]}-{int(is_traced):02x}"),
        )
        times: list[int] = []
        timing = common_pb2.Timing()
        for frame in self._stub.Generate(body, timeout=CALL_TIMEOUT_S, metadata=metadata):
            times.extend([time.time_ns()] * frame.num_tokens)
            if frame.HasField("timing"):
                timing = frame.timing
        gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(times[1:])]
        return Answer((times[0], times[1]), statistics.median(gaps), timing)


def read_spans(trace_file: Path, trace_id: str) -> dict[str, tuple[int, int]]:
    """Wait for the stages of one request; name -> start and end, wall-clock nanoseconds."""
    deadline = time.monotonic() + SPANS_WITHIN_S
    wanted = {"isthmus.prefill", "isthmus.handoff", "isthmus.decode.queue", "isthmus.decode"}
    while True:
        text = trace_file.read_text() if trace_file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        spans = [json.loads(line) for line in whole.splitlines()]
        own = [span for span in spans if span["trace_id"] == trace_id]
        found = {span["name"]: (span["start_ns"], span["end_ns"]) for span in own}
        if found.keys() >= wanted:
            return found
        if time.monotonic() > deadline:
            missing = ", ".join(sorted(wanted - found.keys()))
            raise BenchFailed(f"no spans within {SPANS_WITHIN_S:g} s: {missing}")
        time.sleep(POLL_S)


def stages_of(answer: Answer, spans: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Milliseconds from the end of the prefill to each stage's end.

    The wall clocks of the processes are taken from one machine's, at different moments: a few
    tenths of a millisecond mean nothing.
    """
    start = spans["isthmus.prefill"][1]
    ends = {
        "first_token_out": answer.token_ns[0],
        "kv_complete": spans["isthmus.handoff"][1],
        "decode_starts": spans["isthmus.decode"][0],
        "second_token_out": answer.token_ns[1],
    }
    return {name: (end - start) / 1e6 for name, end in ends.items()}


def result_of(done: Mapping[int, Sequence[Round]]) -> BenchResult:
    """Medians over rounds; the bar is on the median of the differences within pairs."""
    result = BenchResult("second-token")
    num_unmoved = 0
    for length, rounds in done.items():
        added = _median([r.added_ms for r in rounds])
        prefix = f"tokens_{length}"
        result.figures[f"{prefix}_rounds"] = len(rounds)
        result.figures[f"{prefix}_added_ms"] = added
        result.figures[f"{prefix}_added_min_ms"] = round(min(r.added_ms for r in rounds), 4)
        result.figures[f"{prefix}_added_max_ms"] = round(max(r.added_ms for r in rounds), 4)
        result.figures[f"{prefix}_second_token_ms"] = _median(
            [r.remote.second_token_ms for r in rounds]
        )
        result.figures[f"{prefix}_itl_ms"] = _median([r.remote.itl_ms for r in rounds])
        for stage in STAGES:
            at = _median([r.stages_ms[stage] for r in rounds])
            result.figures[f"{prefix}_after_prefill_{stage}_ms"] = at
        result.reference[f"{prefix}_one_worker_second_token_ms"] = _median(
            [r.local.second_token_ms for r in rounds]
        )
        result.reference[f"{prefix}_one_worker_itl_ms"] = _median([r.local.itl_ms for r in rounds])
        text = f"added to the second token, {length} tokens, ms"
        result.bars.append(Bar(text, added, bar_ms(length), "<="))
        num_unmoved += sum(not r.remote.timing.handoff_bytes for r in rounds)
    result.bars.append(Bar("requests that moved no KV", num_unmoved, 0, "=="))
    return result


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)
