"""The loads by which ways to size pools are compared: workload, cluster, SLO, policy. Pure data.

A sine and a step are drawn; a trace in the form Azure published comes from a file, ten times as
fast, or ten of each of its requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from services.autoscaler.policy import PoolAutoscalingPolicy, Role
from services.autoscaler.policy_file import parse_policy
from services.bench.result import BenchFailed
from services.common.config_source import parse_yaml
from services.router.admission import AdmissionConfig
from services.sim.azure import read_azure
from services.sim.cluster import DECODE, PREFILL, ClusterSpec
from services.sim.performance import shipped_model
from services.sim.trace_file import BadTrace
from services.sim.varying import Sine, Step, VaryingLoad, copies, varying_workload
from services.sim.workload import Workload

SINE, STEP, FAST, DENSE = "sine", "step", "trace-fast", "trace-dense"
DRAWN = (SINE, STEP)
TRACED = (FAST, DENSE)
TIMES = 10  # that a trace is as fast, or as dense
_COPY_WITHIN_S = 1.0
_ORACLE_WINDOW_S = 300.0
_RATE_WINDOW_S = 15.0
_STEP = Step(base=8.0, high=48.0, begins_s=300.0, ends_s=720.0)
_STEP_ENDS_S = 1200.0
_SINE = Sine(least=1.0, most=24.0, period_s=900.0)
_SINE_ENDS_S = 1800.0
# Pools are sized apart, so prefill workers are kept from decoding while decode workers can: with
# this price of a second in which one does. With the usual one an eighth of the long answers stay,
# and their gaps are those of whole chunks.
_HOLD = 20.0
_FIXED_DECODE = 8  # where only prefill is sized


@dataclass(frozen=True, slots=True)
class Case:
    """One load with what is judged by."""

    name: str
    workload: Workload
    spec: ClusterSpec
    policy: PoolAutoscalingPolicy
    ttft_s: float
    tpot_s: float | None
    oracle_window_s: float
    follows_rates: bool  # how the oracle plans: by work a window, or by what waits in each
    # What peers hold each replica at: queued tokens or requests, by pool.
    hpa_targets: Mapping[str, float]
    kpa_targets: Mapping[str, float]
    step: Step | None = None

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that are sized."""
        return tuple(self.hpa_targets)

    @property
    def startup_s(self) -> float:
        """Seconds of a worker's start."""
        return self.spec.model.startup_s


def shipped_policy(name: str) -> PoolAutoscalingPolicy:
    """Read a policy that comes with the benchmark."""
    found = files("services.bench") / "policies" / name
    return parse_policy(parse_yaml(found.read_text(encoding="utf-8"), name), name)


def sine(seed: int) -> Case:
    """1 to 24 requests a second and back within 900 s; 8,000 tokens in, 1,000 out; both pools."""
    load = VaryingLoad("sine", _SINE, _SINE.most, _SINE_ENDS_S, 8000, 1000)
    policy = shipped_policy("waves.yaml")
    return Case(
        name=SINE,
        workload=varying_workload(load, seed),
        spec=_cluster(policy, "long_prompts.json"),
        policy=policy,
        ttft_s=3.0,
        tpot_s=0.035,
        oracle_window_s=_RATE_WINDOW_S,
        follows_rates=True,
        # A second and a half of prompts; four fifths of the answers that fit 35 ms.
        hpa_targets={PREFILL: 24_000.0, DECODE: 80.0},
        kpa_targets={PREFILL: 2.0, DECODE: 80.0},
    )


def step(seed: int) -> Case:
    """Six times the load at once, with admission: what would come too late is refused."""
    load = VaryingLoad("step", _STEP, _STEP.high, _STEP_ENDS_S, 2000, 100, spread=0.5)
    policy = shipped_policy("steps.yaml")
    return Case(
        name=STEP,
        workload=varying_workload(load, seed),
        spec=_cluster(policy, "quick_start.json", AdmissionConfig(slo_ttft_s=2.0)),
        policy=policy,
        ttft_s=2.0,
        tpot_s=None,
        oracle_window_s=_RATE_WINDOW_S,
        follows_rates=True,
        hpa_targets={PREFILL: 15_000.0},
        kpa_targets={PREFILL: 4.0},
        step=_STEP,
    )


def traced(name: str, path: Path, seed: int) -> Case:
    """A recorded load, ten times as fast or ten times as dense.

    Raises:
        BenchFailed: the file cannot be read as a trace.
    """
    try:
        recorded = read_azure(path, TIMES if name == FAST else 1.0)
    except (OSError, BadTrace) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchFailed(f"cannot replay {path}: {reason}") from error
    times, within_s = (1, 0.0) if name == FAST else (TIMES, _COPY_WITHIN_S)
    policy = shipped_policy("bursts_fast.yaml" if name == FAST else "bursts.yaml")
    return Case(
        name=name,
        workload=copies(recorded, times, within_s, seed),
        spec=_cluster(policy, "quick_start.json"),
        policy=policy,
        ttft_s=2.0,
        tpot_s=None,
        oracle_window_s=_ORACLE_WINDOW_S,
        follows_rates=False,
        hpa_targets={PREFILL: 20_000.0},
        kpa_targets={PREFILL: 4.0},
    )


def _cluster(
    policy: PoolAutoscalingPolicy, model: str, admission: AdmissionConfig | None = None
) -> ClusterSpec:
    """Begin with the sizes that the policy begins with."""
    sizes = {
        pool.role: pool.min_replicas if pool.initial_replicas is None else pool.initial_replicas
        for pool in policy.spec.pools
    }
    return ClusterSpec(
        sizes[Role.PREFILL],
        sizes.get(Role.DECODE, _FIXED_DECODE),
        model=shipped_model(model),
        admission=admission,
        hold=_HOLD,
    )
