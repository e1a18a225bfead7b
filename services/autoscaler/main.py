"""An autoscaler process from configuration to exit."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from services.autoscaler.controller import Controller, Parts
from services.autoscaler.driver import Driver, DriverError
from services.autoscaler.epoch_clock import EpochClock
from services.autoscaler.leadership import Lease
from services.autoscaler.policy import PoolAutoscalingPolicy, PredictiveMode
from services.autoscaler.policy_file import load_policy
from services.autoscaler.predictors import check_predictor
from services.autoscaler.profile import Profile
from services.autoscaler.prometheus import queries_of
from services.autoscaler.record import DecisionLog
from services.autoscaler.signal_reader import External, SignalReader
from services.autoscaler.worker_calls import OPTIONS, Dial, WorkerCalls, plaintext
from services.common.address import split_host_port
from services.common.clock import Clock, SystemClock
from services.common.config import IsthmusConfig, is_loopback
from services.common.errors import ConfigError
from services.common.model_manifest import read_manifest
from services.registry.reader import RedisRegistryReader
from services.registry.scaling import ScalingStore
from services.registry.schema import Keys, namespace_of
from services.registry.store_client import store_address
from services.runtime.run import Phases, run_service
from services.runtime.tls import cluster_identity
from services.runtime.watched_file import WatchedFile
from services.telemetry.logs import get_logger
from services.telemetry.metrics import Metrics
from services.telemetry.side_doors import SideDoors

log = get_logger(__name__)

_NAME = "grpc.ssl_target_name_override"

ReadProfile = Callable[[str], Profile]  # by its name; raises ConfigError
# Makes the driver of a policy: calls to workers, the controller's clock.
MakeDriver = Callable[[PoolAutoscalingPolicy, WorkerCalls, EpochClock], Driver]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says besides the configuration."""

    policy: Path
    make_driver: MakeDriver
    read_profile: ReadProfile
    external: External | None = None
    record: Path | None = None
    host: str = "127.0.0.1"
    grpc_port: int = 0  # of the health service; 0 = any free
    metrics_port: int | None = None  # None = no /metrics, 0 = any free


def run_autoscaler(config: IsthmusConfig, model_dir: Path, options: Options) -> int:
    """Run until a signal; return the exit status. Raises ConfigError."""
    process = _AutoscalerProcess(config, model_dir, options, SystemClock())
    return run_service(
        Phases(process.start, process.drain, process.stop, process.failed), drain_s=5.0
    )


async def told_status(config: IsthmusConfig, model_dir: Path) -> str:
    """Return the status that whoever leads keeps in the store, JSON; raises StoreUnavailable."""
    namespace = _namespace(config, model_dir)
    registry = RedisRegistryReader(store_address(config.store), namespace, SystemClock())
    try:
        return await ScalingStore(Keys(namespace), registry.run).status()
    finally:
        await registry.close()


def _namespace(config: IsthmusConfig, model_dir: Path) -> str:
    manifest = read_manifest(model_dir, config.model.weights_digest)
    return namespace_of(manifest.weights_digest)


def dial_workers(config: IsthmusConfig, clock: Clock) -> Dial:
    """Say how workers are reached: like a router, with its certificates. Raises ConfigError."""
    identity = cluster_identity(config.tls, clock)
    if identity is None:

        def dial_plaintext(address: str) -> grpc.aio.Channel:
            if not (config.auth.allow_plaintext or is_loopback(split_host_port(address)[0])):
                raise DriverError("plaintext to another host needs auth.allow_plaintext")
            return plaintext(address)

        return dial_plaintext

    def dial(address: str) -> grpc.aio.Channel:
        options = (*OPTIONS, (_NAME, config.tls.worker_name))
        return grpc.aio.secure_channel(address, identity.channel_credentials(), options)

    return dial


@dataclass(frozen=True, slots=True)
class Followed:
    """A policy, and the profile that it names."""

    policy: PoolAutoscalingPolicy
    profile: Profile | None


def read_followed(options: Options) -> Followed:
    """Read a policy that can be followed with what is installed here; raises ConfigError."""
    policy = load_policy(options.policy)
    predictive = policy.spec.predictive
    check_predictor(predictive)
    named = predictive.capacity_model.profile_ref
    if named is None or predictive.mode is PredictiveMode.OFF:
        return Followed(policy, None)
    return Followed(policy, options.read_profile(named.name))


def read_again(options: Options, known: PoolAutoscalingPolicy) -> Followed:
    """Read an edited policy; ConfigError also where it needs what was only made for the first.

    The driver knows pools by name, and the figures to ask a Prometheus server for were chosen.
    """
    followed = read_followed(options)
    then, now = (
        {pool.name: pool.role for pool in policy.spec.pools} for policy in (known, followed.policy)
    )
    if then != now:
        raise ConfigError(
            f"{options.policy}: spec.pools: another name or role needs a restart of the autoscaler"
        )
    unasked = queries_of(followed.policy.spec).items() - queries_of(known.spec).items()
    if unasked:
        raise ConfigError(
            f"{options.policy}: spec: figures that were not asked for at the start need a restart "
            f"of the autoscaler: {', '.join(sorted(name for name, _ in unasked))}"
        )
    return followed


class _AutoscalerProcess:
    """The phases of one process."""

    def __init__(
        self, config: IsthmusConfig, model_dir: Path, options: Options, clock: Clock
    ) -> None:
        self._options = options
        self._metrics = Metrics.enabled()
        self._doors = SideDoors(self._metrics)
        policy = read_followed(options).policy
        followed = WatchedFile(
            "--policy", (options.policy,), lambda: read_again(options, policy), clock
        )
        namespace = _namespace(config, model_dir)
        self._registry = RedisRegistryReader(store_address(config.store), namespace, clock)
        scaling = ScalingStore(Keys(namespace), self._registry.run)
        # One for looking, one for acting: the one forgets workers that are out of the registry.
        dial = dial_workers(config, clock)
        self._calls = WorkerCalls(dial)
        epoch = EpochClock(clock)
        self._driver = options.make_driver(policy, WorkerCalls(dial), epoch)
        self._controller = Controller(
            Parts(
                policy=lambda: followed.get().policy,
                reader=SignalReader(self._registry, scaling, self._calls, options.external),
                driver=self._driver,
                lease=Lease(scaling, secrets.token_hex(8), clock),
                clock=epoch,
                metrics=self._metrics,
                record=None if options.record is None else DecisionLog(options.record),
                profile=lambda: followed.get().profile,
                refusal=lambda: followed.refusal,
            )
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve health and metrics, then begin to tick."""
        options = self._options
        port = await self._doors.open(options.host, options.grpc_port, options.metrics_port)
        self._running = asyncio.create_task(self._controller.run(), name="autoscaler")
        await self._doors.say_serving()
        log.info("autoscaler.started", policy=str(options.policy), grpc_port=port)

    async def failed(self) -> str:
        """Come back when the loop has ended, which it never should."""
        assert self._running is not None
        await asyncio.wait({self._running})
        return "the autoscaler's loop has ended"

    async def drain(self) -> None:
        """Stop deciding, and let another one lead."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def stop(self) -> None:
        """Let go of everything; replicas go on."""
        await self.drain()
        await self._driver.close()
        await self._calls.close()
        await self._registry.close()
        await self._doors.close()
        self._metrics.shutdown()
