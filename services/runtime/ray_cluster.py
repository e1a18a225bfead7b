"""Worker processes as named, detached Ray actors: on a Ray of our own, or on somebody's cluster.

Ray places processes and tells when they end, nothing else. A worker that has ended is never
restarted by Ray: that is a new incarnation, and the decision of who started it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.log_record import write_event
from services.runtime.ray_actor import Begun, WorkerActor, WorkerOrder, node_address

_logger = logging.getLogger(__name__)

KILLED = -int(signal.SIGKILL)  # exit status of a process that did not live to tell one
_OBJECT_STORE_BYTES = 80 << 20  # the least there is: workers put nothing into it
_MAX_CALLS = 64  # of an actor at once
_TOKEN_BYTES = 32
_AUTH_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# A Ray of our own serves a handful of actors: it needs no usage reports, no metrics, and no
# processes started ahead.
_LOCAL_ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """What a worker takes of a node, and which nodes will do."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)  # of the node, all of them
    num_gpus: float = 0.0
    num_bundles: int = 1  # ranks of a tensor-parallel replica, all on one node

    def bundles(self) -> list[dict[str, float]]:
        """One for each rank."""
        gpus = {"GPU": self.num_gpus} if self.num_gpus else {}
        return [{**self.resources, **gpus} for _ in range(self.num_bundles)]


Note = Callable[[str], None]


def _log_note(line: str) -> None:
    write_event(_logger, logging.WARNING, "ray.worker", {"reason": line})


class RayWorker:
    """An actor and the worker in it, seen from outside: what a supervised process has to offer.

    Never waits, `wait` excepted: what Ray has to tell is looked for whenever something is asked.
    """

    # Any: Ray's handles are made at run time and have no types of their own.
    def __init__(
        self, name: str, actor: Any, begun: Any, group: Any = None, note: Note = _log_note
    ) -> None:
        """`note` is told why it does not run, where more is known than its exit status."""
        self.name = name
        self.returncode: int | None = None
        self._note = note
        self._actor = actor
        self._group = group
        self._begun_ref = begun
        self._serving_ref = actor.serving.remote()
        self._ended_ref = actor.ended.remote()
        self._begun: Begun | None = None
        self._is_serving = False

    @property
    def begun(self) -> Begun | None:
        """Where it runs; None while Ray has not placed it."""
        return self._begun

    @property
    def pid(self) -> int | None:
        """Process id on its node."""
        return None if self._begun is None else self._begun.pid

    @property
    def is_serving(self) -> bool:
        """Whether it has got as far as serving."""
        return self._is_serving

    def poll(self) -> int | None:
        """Look at what Ray has to tell; exit status, None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired([self.name], timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Take the two signals a supervisor ends processes with."""
        if sig == signal.SIGKILL or (sig == signal.SIGTERM and self._begun is None):
            self.kill()
        elif sig == signal.SIGTERM:
            self.stop()

    def stop(self, drain_s: float | None = None) -> None:
        """Let the worker drain, for so long at most (None = as configured), and end."""
        if self.poll() is None:
            self._actor.stop.remote(drain_s)

    def kill(self) -> None:
        """End the process at once; one that was not placed yet never will be."""
        if self.returncode is None:
            self._end(KILLED)

    def _look(self, timeout_s: float | None) -> int | None:
        import ray

        if self.returncode is not None:
            return self.returncode
        ready, _ = ray.wait([self._ended_ref], timeout=timeout_s)
        if self._begun is None and ray.wait([self._begun_ref], timeout=0)[0]:
            self._take_begun()
        if self.returncode is None and self._begun and not self._is_serving:
            self._is_serving = bool(self._value_of(self._serving_ref))
        if self.returncode is None and ready:
            self._take_end()
        return self.returncode

    def _take_begun(self) -> None:
        begun = self._value_of(self._begun_ref)
        if isinstance(begun, Begun):
            self._begun = begun
            if begun.refused:
                self._note(begun.refused)

    def _take_end(self) -> None:
        import ray

        try:
            status = int(ray.get(self._ended_ref, timeout=0))
        except ray.exceptions.ActorUnavailableError:
            # The connection broke, which need not be the actor's end: ask again.
            self._ended_ref = self._actor.ended.remote()
            return
        except ray.exceptions.RayActorError as error:
            self._note(f"{self.name}: {_first_line(error)}")
            status = KILLED
        self._end(status)

    def _value_of(self, ref: Any) -> Any:
        """What a call has given so far; None if nothing, or if it failed with its actor."""
        import ray

        if not ray.wait([ref], timeout=0)[0]:
            return None
        try:
            return ray.get(ref, timeout=0)
        except ray.exceptions.RayActorError:
            return None  # the end tells

    def _end(self, status: int) -> None:
        """Let Ray forget the actor: its process goes on without a worker in it else."""
        import ray

        self.returncode = status
        ray.kill(self._actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def new_name(role: str) -> str:
    """Name an actor: names tell the role, and are never used twice."""
    return f"{role}-{secrets.token_hex(4)}"


class RayCluster:
    """A connection of this process to Ray, and the workers of one namespace there."""

    def __init__(self, namespace: str, *, is_own: bool) -> None:
        self.namespace = namespace
        self.is_own = is_own  # started here, and ended with `close`
        self._actor_class: Any = None

    @classmethod
    def start(
        cls,
        namespace: str,
        directory: Path,
        slots: Mapping[str, float],
        environ: MutableMapping[str, str],
    ) -> RayCluster:
        """Start a Ray on this machine that ends with this process, `slots` being its resources.

        Call it on the main thread: to the kernel the death of the starting thread is the parent's.

        Args:
            namespace: of the workers' names.
            directory: private and short; takes Ray's files and the token.
            slots: by name; actors take no CPUs, because two would fill a small machine.
            environ: of this process; Ray and what it starts read it.
        """
        require_ray()
        _use_token(environ, directory)
        for name, value in _LOCAL_ENVIRON.items():
            environ.setdefault(name, value)
        _init(
            address="local",
            num_cpus=0,
            resources=dict(slots),
            object_store_memory=_OBJECT_STORE_BYTES,
            namespace=namespace,
            _temp_dir=str(directory),
        )
        return cls(namespace, is_own=True)

    @classmethod
    def connect(cls, address: str, namespace: str, environ: MutableMapping[str, str]) -> RayCluster:
        """Join a cluster that runs; this machine has to be one of its nodes."""
        require_ray()
        if "://" in address:
            raise ConfigError(
                f"ray.address: {address} is a Ray client's; run this on a node of the cluster and "
                "give HOST:PORT or auto"
            )
        _require_token(environ)
        _init(address=address, namespace=namespace)
        return cls(namespace, is_own=False)

    @property
    def address(self) -> str:
        """Where others find this Ray."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    @property
    def node_address(self) -> str:
        """Address of this machine as a node."""
        return node_address()

    def launch(
        self, name: str, order: WorkerOrder, placement: Placement, note: Note = _log_note
    ) -> RayWorker:
        """Ask for one more worker; it may be pending as long as no node has room for it."""
        import ray

        group, options = self._place(name, placement)
        if self._actor_class is None:
            self._actor_class = ray.remote(WorkerActor)
        actor = self._actor_class.options(
            name=name,
            namespace=self.namespace,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=_MAX_CALLS,
            num_cpus=0,
            **options,
        ).remote()
        fields = {"actor": name, "namespace": self.namespace}
        write_event(_logger, logging.INFO, "ray.worker_asked_for", fields)
        return RayWorker(name, actor, actor.start.remote(order), group, note)

    def _place(self, name: str, placement: Placement) -> tuple[Any, dict[str, Any]]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"resources": dict(placement.resources)}
        if placement.num_gpus:
            options["num_gpus"] = placement.num_gpus
        labels = dict(placement.labels)
        if placement.num_bundles == 1:
            return None, {**options, "label_selector": labels} if labels else options
        group = ray.util.placement_group(
            placement.bundles(),
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[labels] * placement.num_bundles if labels else None,
        )
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return group, {**options, "scheduling_strategy": strategy}

    def adopt(self, known: Container[str] = ()) -> list[RayWorker]:
        """Take over the workers of this namespace that are not known yet, whoever started them."""
        import ray

        found = []
        for name in sorted(ray.util.list_named_actors()):
            if name in known:
                continue
            try:
                actor = ray.get_actor(name, namespace=self.namespace)
            except ValueError:
                continue  # ended since
            group = ray.util.get_placement_group(name) if _has_group(name) else None
            found.append(RayWorker(name, actor, actor.begun.remote(), group))
        return found

    def close(self) -> None:
        """Let go of Ray, and end it if it is our own; workers on somebody's cluster go on."""
        import ray

        ray.shutdown()


def require_ray() -> None:
    """Raise ConfigError where Ray is not installed.

    It is not imported here: Ray reads the environment at import, which is not set up yet.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'isthmus[ray]'")


def _has_group(name: str) -> bool:
    import ray

    return any(group["name"] == name for group in ray.util.placement_group_table().values())


def _use_token(environ: MutableMapping[str, str], directory: Path) -> None:
    """Make Ray ask for a token, drawn here unless there is one: its ports are open to others."""
    if environ.setdefault(_AUTH_MODE, "token") != "token":
        return
    if _TOKEN in environ or _TOKEN_PATH in environ:
        return
    path = directory / "token"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    environ[_TOKEN_PATH] = str(path)


def _require_token(environ: MutableMapping[str, str]) -> None:
    if environ.setdefault(_AUTH_MODE, "token") != "token":
        return
    default = Path(environ.get("HOME", "/")) / ".ray" / "auth_token"
    if not (environ.get(_TOKEN) or environ.get(_TOKEN_PATH) or default.is_file()):
        raise ConfigError(
            f"the cluster's token is missing: set {_TOKEN_PATH} (or {_TOKEN}), or "
            f"{_AUTH_MODE}=disabled for a cluster without tokens"
        )


def _init(**options: Any) -> None:
    import ray

    address = options["address"]
    with _own_signals():
        try:
            ray.init(
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
        except Exception as error:  # a node that does not start in time is told of as just that
            what = "Ray did not start" if address == "local" else f"no Ray at {address}"
            raise ConfigError(f"{what}: {_first_line(error)}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Undo that Ray answers signals in our place."""
    is_main = threading.current_thread() is threading.main_thread()  # else Ray cannot either
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
