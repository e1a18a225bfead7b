"""Run one service: start, wait for a signal or a fault, drain within a limit, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from services.common.errors import ConfigError, ModelFileError
from services.common.log_record import write_event

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Waiter = asyncio.Future[Any]  # only its being done matters

EXIT_OK = 0
EXIT_FAILED = 1
_STOP_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Phases:
    """What a service does at each step of its life.

    start: comes back when the service can take requests, or raises.
    drain: refuses new work and waits for running work; is cancelled at the limit.
    stop: ends what is left with a coded error and frees everything.
    failed: comes back (with the reason) only if the service cannot go on.
    """

    start: Callable[[], Awaitable[None]]
    drain: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]
    failed: Callable[[], Awaitable[str]] | None = None


class Leash:
    """Holds a service that runs beside others in its process, where signals are not its own.

    Its methods may be called from any thread, before the service runs, and after it.
    """

    def __init__(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """`on_ready` is called on the service's thread once it can take requests."""
        self.on_ready = on_ready
        self.drain_s: float | None = None  # None = the service's own
        self._lock = threading.Lock()
        self._is_pulled = False
        self._wake: Callable[[], None] | None = None

    def pull(self, drain_s: float | None = None) -> None:
        """Ask the service to drain, for so long at most, and to end; only the first one counts."""
        with self._lock:
            if self._is_pulled:
                return
            self._is_pulled, self.drain_s = True, drain_s
            if self._wake is not None:
                self._wake()

    @contextlib.contextmanager
    def held_by(self, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> Iterator[None]:
        """Set the event on that loop when pulled, for the duration of a block."""
        with self._lock:
            self._wake = lambda: _wake_up(loop, stopping)
            if self._is_pulled:
                stopping.set()
        try:
            yield
        finally:
            with self._lock:  # the loop is about to close
                self._wake = None


def _wake_up(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stopping.set)


def run_service(
    phases: Phases, *, drain_s: float, use_uvloop: bool = True, leash: Leash | None = None
) -> int:
    """Run until SIGTERM or SIGINT, or until the leash is pulled; return the exit status.

    The first signal drains. After it both signals have their default action, so that a second
    one ends the process at once, whatever the event loop is doing. With a leash signals are left
    alone: the process is not the service's, and this may be any thread.

    Raises:
        ConfigError, ModelFileError: from `start`, after `stop`; the caller shows them to people.
    """
    with asyncio.Runner(loop_factory=_loop_factory(use_uvloop)) as runner:
        if leash is None:
            return runner.run(_run(phases, drain_s))
        return runner.run(_run_on_leash(phases, drain_s, leash))


def _loop_factory(use_uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if not use_uvloop:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


async def _run(phases: Phases, drain_s: float) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: signal.Signals) -> None:
        for each in signals:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        _log(logging.INFO, "service.signal", signal=number.name, drain_s=drain_s)
        stopping.set()

    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await _live(phases, stopping, lambda: drain_s)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _run_on_leash(phases: Phases, drain_s: float, leash: Leash) -> int:
    stopping = asyncio.Event()
    with leash.held_by(asyncio.get_running_loop(), stopping):
        return await _live(
            phases,
            stopping,
            lambda: drain_s if leash.drain_s is None else leash.drain_s,
            leash.on_ready,
        )


async def _live(
    phases: Phases,
    stopping: asyncio.Event,
    drain_s: Callable[[], float],
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    signalled: _Waiter = asyncio.ensure_future(stopping.wait())
    try:
        if not await _start(phases, signalled):
            await _stop(phases)
            return EXIT_OK if signalled.done() else EXIT_FAILED
        on_ready()
        fault = await _until_signal_or_fault(phases, signalled)
        if fault is None:
            await _drain(phases, drain_s())
        else:
            _log(logging.ERROR, "service.failed", reason=fault)
        is_stopped = await _stop(phases)
        return EXIT_OK if fault is None and is_stopped else EXIT_FAILED
    finally:
        signalled.cancel()


async def _start(phases: Phases, signalled: _Waiter) -> bool:
    """Start; False = the service does not go on to serve."""
    starting: _Waiter = asyncio.ensure_future(_await(phases.start()))
    await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # a signal while starting: there is nothing to drain
        starting.cancel()
        await asyncio.wait({starting}, timeout=_STOP_LIMIT_S)
        return False
    try:
        starting.result()
    except (ConfigError, ModelFileError):
        await _stop(phases)
        raise
    except Exception:
        _log_failure("service.start_failed")
        return False
    _log(logging.INFO, "service.ready")
    return True


async def _until_signal_or_fault(phases: Phases, signalled: _Waiter) -> str | None:
    if phases.failed is None:
        await signalled
        return None
    failed: asyncio.Future[str] = asyncio.ensure_future(_await(phases.failed()))
    try:
        waiters: set[_Waiter] = {failed, signalled}
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            return None
        error = failed.exception()
        return failed.result() if error is None else f"{type(error).__name__}: {error}"
    finally:
        failed.cancel()


async def _drain(phases: Phases, drain_s: float) -> None:
    try:
        await asyncio.wait_for(_await(phases.drain()), drain_s)
        _log(logging.INFO, "service.drained")
    except TimeoutError:
        _log(logging.WARNING, "service.drain_limit", drain_s=drain_s)
    except Exception:
        _log_failure("service.drain_failed")  # stopping matters more than draining


async def _stop(phases: Phases) -> bool:
    try:
        await asyncio.wait_for(_await(phases.stop()), _STOP_LIMIT_S)
    except Exception:
        _log_failure("service.stop_failed")
        return False
    _log(logging.INFO, "service.stopped")
    return True


def _log(level: int, event: str, **fields: object) -> None:
    write_event(_logger, level, event, fields)


def _log_failure(event: str) -> None:
    """Log the exception being handled."""
    write_event(_logger, logging.ERROR, event, {}, error=True)


async def _await(awaitable: Awaitable[_T]) -> _T:
    """Turn any awaitable into a coroutine, which tasks and wait_for need."""
    return await awaitable
