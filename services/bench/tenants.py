"""`isthmus bench tenants`: can one tenant tell by the clock what another one has asked?

Each round has a prompt the victim has just sent and one that nobody has. The prober, another
tenant, sends both, in random order, and times the first token: the closer the two distributions,
the less it learns. The victim then sends its prompt again: what it saves shows that the same
clock would have noticed a shared cache. Workers are scripted: a prompt takes its length.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from services.bench.local_cluster import LocalCluster
from services.bench.result import Bar, BenchResult
from services.common.progress import Progress, silent
from services.gateway.keys import create_key
from services.gateway.namespaces import SECRET_NAME, make_secret
from services.pb import inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 60.0
LOW, HIGH = 0.45, 0.55  # of a coin, with room for chance
SEEN = 0.7
WARM_UP_ROUNDS = 5


@dataclass(slots=True)
class Probes:
    """Seconds to the first token, and tokens that came from a cache."""

    known_s: list[float] = field(default_factory=list)  # the victim's prompt, sent by the prober
    unknown_s: list[float] = field(default_factory=list)  # nobody's prompt, sent by the prober
    again_s: list[float] = field(default_factory=list)  # the victim's prompt, sent by the victim
    foreign_hits: int = 0
    own_hits: int = 0


def run(
    model: Path, *, rounds: int, prompt_tokens: int, seed: int, progress: Progress = silent
) -> BenchResult:
    """Start 1 prefill and 1 decode worker, scripted, and probe."""
    probes, rng = Probes(), random.Random(seed)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as directory:
        path = Path(directory)
        keys = path / "keys.json"
        victim, _ = create_key(keys, "victim", "", 0)
        prober, _ = create_key(keys, "prober", "", 0)
        monitor, _ = create_key(keys, "operator", "", 0, ("monitor",))
        make_secret(path / SECRET_NAME)
        progress("starting 1 + 1 workers", 0.0)
        cluster = LocalCluster(
            model,
            prefill=1,
            decode=1,
            flags=("--engine", "scripted"),
            settings={"ISTHMUS_AUTH__KEYS_FILE": str(keys)},
            api_key=monitor,
        )
        with cluster, grpc.insecure_channel(cluster.grpc) as channel:
            client = _Client(channel, victim, prober)
            for number in range(rounds + WARM_UP_ROUNDS):
                progress("probing", number / (rounds + WARM_UP_ROUNDS))
                client.round(rng, prompt_tokens, probes if number >= WARM_UP_ROUNDS else Probes())
    result = result_of(probes, prompt_tokens)
    result.reference["load_average_before"] = round(load_before, 2)
    return result


class _Client:
    """Sends prompts as one tenant or the other."""

    def __init__(self, channel: grpc.Channel, victim: str, prober: str) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._victim, self._prober = ((("authorization", f"Bearer {k}"),) for k in (victim, prober))
        listed = self._stub.ListModels(
            inference_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S, metadata=self._victim
        )
        self._vocab_size = listed.models[0].vocab_size

    def round(self, rng: random.Random, prompt_tokens: int, probes: Probes) -> None:
        """Let the victim ask, probe both prompts, and let the victim ask again."""
        known, unknown = (
            [rng.randrange(self._vocab_size) for _ in range(prompt_tokens)] for _ in range(2)
        )
        self._ask(known, self._victim)
        order = [(known, probes.known_s), (unknown, probes.unknown_s)]
        rng.shuffle(order)
        for prompt, times in order:
            took_s, cached = self._ask(prompt, self._prober)
            times.append(took_s)
            probes.foreign_hits += cached
        took_s, cached = self._ask(known, self._victim)
        probes.again_s.append(took_s)
        probes.own_hits += cached

    def _ask(self, prompt: Sequence[int], who: tuple[tuple[str, str], ...]) -> tuple[float, int]:
        body = inference_pb2.GenerateRequest(
            token_ids=np.asarray(prompt, dtype="<u4").tobytes(), max_tokens=2, ignore_eos=True
        )
        started, first_s, cached = time.perf_counter(), 0.0, 0
        for frame in self._stub.Generate(body, timeout=CALL_TIMEOUT_S, metadata=who):
            first_s = first_s or time.perf_counter() - started
            if frame.HasField("usage"):
                cached = frame.usage.cached_tokens
        return first_s, cached


def auc(first: Sequence[float], second: Sequence[float]) -> float:
    """Give how often a value of `first` is below one of `second`; 0.5 = nothing to tell them by."""
    ranks = np.argsort(np.argsort(np.concatenate([first, second]), kind="stable")) + 1
    below = float(ranks[len(first) :].sum()) - len(second) * (len(second) + 1) / 2
    return below / (len(first) * len(second))


def result_of(probes: Probes, prompt_tokens: int) -> BenchResult:
    """Judge what was measured."""
    result = BenchResult("tenants")
    foreign, own = auc(probes.known_s, probes.unknown_s), auc(probes.again_s, probes.unknown_s)
    result.figures |= {
        "rounds": len(probes.known_s),
        "prompt_tokens": prompt_tokens,
        "auc_of_another_tenant": round(foreign, 4),
        "auc_of_the_same_tenant": round(own, 4),
        "cached_tokens_of_another_tenant": probes.foreign_hits,
        "cached_tokens_of_the_same_tenant": probes.own_hits,
        "ttft_of_a_known_prompt_ms": _median_ms(probes.known_s),
        "ttft_of_an_unknown_prompt_ms": _median_ms(probes.unknown_s),
        "ttft_of_its_own_prompt_ms": _median_ms(probes.again_s),
    }
    result.bars += [
        Bar("cached tokens of another tenant", probes.foreign_hits, 0, "=="),
        Bar("AUC of another tenant, least", round(foreign, 4), LOW, ">="),
        Bar("AUC of another tenant, most", round(foreign, 4), HIGH, "<="),
        # Below it the machine is too busy for the clock to notice even a hit.
        Bar("AUC of the same tenant", round(own, 4), SEEN, ">="),
    ]
    return result


def _median_ms(times_s: Sequence[float]) -> float:
    return round(float(np.median(times_s)) * 1000, 3)
