"""A real worker process whose model is scripted: everything but the arithmetic, without torch.

    python -m services.chaos.scripted_worker --config FILE [--role prefill ...]

Takes the configuration and the environment of `isthmus worker`; starts in a fraction of the time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.chaos.scripted_model import ScriptedModel
from services.common.config import IsthmusConfig, load_config
from services.common.errors import ConfigError
from services.common.model_manifest import ModelManifest
from services.engine.loop import Executor
from services.engine.plan import PlanRow, RowResult, StepPlan, StepResult
from services.engine.residency import BlockContent
from services.engine.sampler import sample
from services.kv.memory import KvPoolMemory
from services.runtime.process import die_with_parent
from services.runtime.run import Leash
from services.telemetry.logs import setup_logging
from services.worker.main import run_worker

SPEED_VARIABLE = "ISTHMUS_SCRIPTED_SPEED"
_FLAGS = (
    ("--role", "worker.role"),
    ("--worker-id", "worker.worker_id"),
    ("--threads", "worker.threads"),
    ("--bind-host", "worker.bind_host"),
    ("--runtime-dir", "worker.runtime_dir"),
    ("--grpc-port", "worker.grpc_port"),
    ("--metrics-port", "worker.metrics_port"),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a step takes; the worker sleeps for what its own work leaves of it."""

    prefill_tok_s: float = 20_000.0
    decode_step_s: float = 0.002
    stall_every: int = 0  # steps with prefill; 0 = never
    stall_s: float = 0.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Speed:
        """Read `PREFILL_TOKENS_PER_S:DECODE_STEP_MS[:STALL_EVERY:STALL_MS]`; else the defaults."""
        value = environ.get(SPEED_VARIABLE, "")
        if not value:
            return cls()
        try:
            rate, step_ms, *stalls = (float(part) for part in value.split(":"))
            every, stall_ms = stalls or (0.0, 0.0)
        except ValueError:
            form = "TOKENS_PER_S:STEP_MS[:STALL_EVERY:STALL_MS]"
            raise ConfigError(f"{SPEED_VARIABLE}: {value!r} is not {form}") from None
        numbers = (rate, step_ms, every, stall_ms)
        if rate <= 0 or not all(0 <= number < float("inf") for number in numbers):
            raise ConfigError(f"{SPEED_VARIABLE}: the numbers must be positive")
        return cls(rate, step_ms / 1000, int(every), stall_ms / 1000)

    def step_s(self, plan: StepPlan) -> float:
        """Duration of a step."""
        return self.decode_step_s + plan.num_prefill_tokens / self.prefill_tok_s


class ScriptedExecutor:
    """Runs step plans with a scripted model."""

    def __init__(self, model: ScriptedModel, eos_token_ids: tuple[int, ...], speed: Speed) -> None:
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._speed = speed
        self._num_prefills = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        started = time.perf_counter()
        rows = tuple(self._run(row) for row in plan.rows)
        left_s = self._step_s(plan) - (time.perf_counter() - started)
        if left_s > 0:
            time.sleep(left_s)
        return StepResult(rows, time.perf_counter() - started)

    def _step_s(self, plan: StepPlan) -> float:
        step_s, every = self._speed.step_s(plan), self._speed.stall_every
        if every and plan.num_prefill_tokens:
            self._num_prefills += 1
            if self._num_prefills % every == 0:
                return step_s + self._speed.stall_s
        return step_s

    def _run(self, row: PlanRow) -> RowResult:
        if row.attached is not None:
            self._model.read_also(row.attached.kv)
        self._model.write(row.start, row.token_ids, row.slots, row.block_ids)
        if not row.tasks:
            return RowResult()
        logits = self._model.logits(row.start + len(row.token_ids), row.block_ids)
        if row.attached is not None and not row.attached.is_current():
            return RowResult(is_stale=True)
        return RowResult(tuple(sample(logits, task, self._eos_token_ids) for task in row.tasks))


class ScriptedBackend:
    """services.worker.backend.Backend without a model to load."""

    kernel_path = "scripted"
    device = None

    def __init__(self, speed: Speed) -> None:
        self._speed = speed

    def attach(
        self, memory: KvPoolMemory, manifest: ModelManifest
    ) -> tuple[BlockContent, Executor]:
        """Compute over this pool from now on."""
        model = ScriptedModel(memory, manifest.vocab_size)
        return model, ScriptedExecutor(model, manifest.eos_token_ids, self._speed)


def load_scripted_backend(_config: IsthmusConfig, _model_dir: Path) -> ScriptedBackend:
    """Read the speed; there is nothing to load."""
    return ScriptedBackend(Speed.from_environ(os.environ))


def main(arguments: Sequence[str] | None = None, leash: Leash | None = None) -> int:
    """Run a worker until a signal or the leash; return the exit status."""
    if not die_with_parent(os.environ):
        return 1
    parser = argparse.ArgumentParser(prog="scripted_worker", description=__doc__)
    parser.add_argument("--config", type=Path)
    for flag, _ in _FLAGS:
        parser.add_argument(flag)
    given = vars(parser.parse_args(arguments))
    overrides = {key: given[flag[2:].replace("-", "_")] for flag, key in _FLAGS}
    try:
        config = load_config(given["config"], os.environ, overrides)
        setup_logging(
            config.telemetry.log_level,
            config.telemetry.log_format,
            static={"worker_id": config.worker.worker_id, "role": config.worker.role},
            secrets=[config.store.url.get_secret_value()],
        )
        return run_worker(config, load_scripted_backend, leash)
    except ConfigError as error:
        sys.stderr.write(f"scripted_worker: configuration: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
