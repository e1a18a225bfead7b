"""What runs in a Ray actor: one worker's ordinary main on a thread, and four calls about it.

Nothing here knows what a worker is. Requests, tokens and KV never pass through these calls: the
worker listens on its own port, as it does as a program.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from services.common.address import HeldPort
from services.common.config_source import without_settings
from services.runtime.process import PARENT_VARIABLE
from services.runtime.run import Leash

_T = TypeVar("_T")
USAGE = 2  # exit status of a worker that cannot run as it was asked to, however often


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What to run. The configuration may hold a password: it is passed on in memory only."""

    program: str  # module:function that takes arguments and a leash, and returns an exit status
    arguments: tuple[str, ...]  # options of where to listen and of the configuration are added
    config_text: str
    host: str  # to bind; empty = the node's own address
    metrics_port: int | None = None  # 0 = any free, None = none
    model_path: str = ""  # has to be there; empty = the worker finds its model by name
    log_path: str = ""  # for its output; empty = Ray's own files

    def __repr__(self) -> str:
        """Say nothing of the configuration: Ray quotes arguments where a call fails."""
        return f"WorkerOrder({self.program}, {' '.join(self.arguments)})"


@dataclass(frozen=True, slots=True)
class Begun:
    """Where the worker runs; or why it does not."""

    pid: int
    host: str
    grpc_port: int
    metrics_port: int = 0  # 0 = none
    refused: str = ""


@dataclass(slots=True)
class _Life:
    """The one worker of an actor. The event loop writes it; threads go through the loop."""

    begun: asyncio.Future[Begun]
    serving: asyncio.Future[bool]  # False = it ended before
    ended: asyncio.Future[int]
    leash: Leash
    ports: list[HeldPort] = field(default_factory=list)


class WorkerActor:
    """Start it, ask about it, drain it, end it. Lives and dies with its process."""

    def __init__(self) -> None:
        self._life: _Life | None = None

    def _own(self) -> _Life:
        """Made on the actor's loop, which the constructor does not run on."""
        if self._life is None:
            loop = asyncio.get_running_loop()
            serving: asyncio.Future[bool] = loop.create_future()

            def tell() -> None:
                loop.call_soon_threadsafe(_settle, serving, True)

            self._life = _Life(loop.create_future(), serving, loop.create_future(), Leash(tell))
        return self._life

    async def start(self, order: WorkerOrder) -> Begun:
        """Run the worker on a thread; a second call tells of the first one's."""
        life = self._own()
        if not life.begun.done():
            life.begun.set_result(_begin(life, order))
        return life.begun.result()

    async def begun(self) -> Begun:
        """Come back when it was started: for those who did not start it themselves."""
        return await asyncio.shield(self._own().begun)

    async def serving(self) -> bool:
        """Come back when it serves (True) or has ended before (False)."""
        return await asyncio.shield(self._own().serving)

    async def ended(self) -> int:
        """Come back with its exit status."""
        return await asyncio.shield(self._own().ended)

    async def stop(self, drain_s: float | None = None) -> None:
        """Let it drain, for so long at most (None = as configured), and end."""
        self._own().leash.pull(drain_s)


def _begin(life: _Life, order: WorkerOrder) -> Begun:
    host = order.host or node_address()
    if order.model_path and not Path(order.model_path).exists():
        _settle(life.serving, False)
        _settle(life.ended, USAGE)
        return Begun(
            os.getpid(), host, 0, refused=f"the node {host} has no model at {order.model_path}: "
            "every node needs it at this path",
        )  # fmt: skip
    _take_over_process(order)
    grpc = HeldPort(host)
    life.ports.append(grpc)
    flags = ["--bind-host", host, "--grpc-port", str(grpc.number)]
    metrics_port = 0
    if order.metrics_port is not None:
        metrics_port = order.metrics_port or _hold(life, host)
        flags += ["--metrics-port", str(metrics_port)]
    flags += ["--config", _config_in_memory(order.config_text)]
    loop = asyncio.get_running_loop()
    threading.Thread(
        target=_run,
        args=(order.program, [*order.arguments, *flags], life, loop),
        name="worker-main",
        daemon=True,
    ).start()
    return Begun(os.getpid(), host, grpc.number, metrics_port)


def _hold(life: _Life, host: str) -> int:
    life.ports.append(HeldPort(host))
    return life.ports[-1].number


def _take_over_process(order: WorkerOrder) -> None:
    """Make the process what the worker's own would be: its output, its environment."""
    if order.log_path:
        fd = os.open(order.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    kept = without_settings(os.environ)  # the order holds all of them, merged
    kept.pop(PARENT_VARIABLE, None)  # the raylet's, or that of whoever started it
    os.environ.clear()
    os.environ.update(kept)


def _config_in_memory(text: str) -> str:
    """A path that only this process can read, and that is gone with it."""
    fd = os.memfd_create("isthmus-config", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return f"/proc/self/fd/{fd}"


def _run(program: str, arguments: list[str], life: _Life, loop: asyncio.AbstractEventLoop) -> None:
    status = 1
    try:
        module, _, name = program.partition(":")
        main = getattr(importlib.import_module(module), name)
        status = int(main(arguments, life.leash))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # the thread's outermost: its end must be told, whatever it was
        traceback.print_exc()
    finally:
        loop.call_soon_threadsafe(_settle, life.serving, False)
        loop.call_soon_threadsafe(_settle, life.ended, status)


def _settle(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def node_address() -> str:
    """Address of this machine as a node of Ray."""
    import ray

    # Ray leaves this one function untyped.
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
