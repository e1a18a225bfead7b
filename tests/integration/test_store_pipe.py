"""StorePipe against a real store, and against servers that break the rules of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import NoScriptError, ResponseError

from services.registry.embedded import EmbeddedStore
from services.registry.store_pipe import StorePipe
from tests.support.store import store

__all__ = ["store"]  # a fixture

pytestmark = pytest.mark.integration

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def pipe_to(url: str) -> AsyncIterator[StorePipe]:
    """Make a pipe for one test."""
    pipe = StorePipe(url)
    try:
        yield pipe
    finally:
        await pipe.close()


@asynccontextmanager
async def server(*connections: Serve) -> AsyncIterator[str]:
    """Serve each connection in its own way, the last way for all that follow."""
    left, ends = list(connections), list[asyncio.Future[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(end := asyncio.get_running_loop().create_future())
        with suppress(ConnectionError):
            await (left.pop(0) if len(left) > 1 else left[0])(reader, writer)
        writer.close()
        end.set_result(None)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await asyncio.gather(*ends)


def saying(answer: bytes) -> Serve:
    """Answer the first thing that is said, then hold the line until the other side ends it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        await reader.read()

    return serve


async def test_calls_share_a_connection_and_get_their_own_answers(store: EmbeddedStore) -> None:
    async with pipe_to(store.url) as pipe:
        ids = [pipe.call("CLIENT", "ID"), pipe.call("CLIENT", "ID")]
        assert len(set(await asyncio.gather(*ids))) == 1
        calls = [pipe.call("ECHO", f"{n}") for n in range(500)]
        assert await asyncio.gather(*calls) == [f"{n}".encode() for n in range(500)]


async def test_a_caller_that_leaves_does_not_shift_the_answers(store: EmbeddedStore) -> None:
    """RB-094: an answer that comes late must not be taken for another call's."""
    async with pipe_to(store.url) as pipe:
        await pipe.call("PING")
        late = asyncio.create_task(pipe.call("BLPOP", "nothing", "0.1"))
        others = [asyncio.create_task(pipe.call("ECHO", n)) for n in range(3)]
        await asyncio.sleep(0)  # all are sent
        late.cancel()
        others[1].cancel()
        assert await others[0] == b"0"
        assert await others[2] == b"2"


async def test_errors_are_answers_and_the_connection_stays(store: EmbeddedStore) -> None:
    async with pipe_to(store.url) as pipe:
        number = await pipe.call("CLIENT", "ID")
        with pytest.raises(ResponseError):
            await pipe.call("NO-SUCH-COMMAND")
        with pytest.raises(NoScriptError):
            await pipe.call("EVALSHA", "0" * 40, 0)
        assert await pipe.call("CLIENT", "ID") == number


async def test_a_lost_connection_fails_its_calls_and_is_made_anew(store: EmbeddedStore) -> None:
    async with pipe_to(store.url) as pipe, pipe_to(store.url) as other:
        number = await pipe.call("CLIENT", "ID")
        assert isinstance(number, int)
        blocked = asyncio.create_task(pipe.call("BLPOP", "nothing", 0))
        while not blocked.done():
            await other.call("CLIENT", "KILL", "ID", number)
            await asyncio.sleep(0.001)
        with pytest.raises(StoreConnectionError):
            await blocked
        assert await pipe.call("CLIENT", "ID") != number


async def test_a_store_that_says_nothing_gets_a_new_connection() -> None:
    """A connection that leads nowhere (a failover, a firewall) must not be used for ever."""
    async with server(saying(b""), saying(b"+PONG\r\n")) as url, pipe_to(url) as pipe:
        answer: object = None
        async with asyncio.timeout(30):
            while answer is None:
                try:
                    async with asyncio.timeout(0.05):
                        answer = await pipe.call("PING")
                except (TimeoutError, StoreConnectionError):
                    continue
        assert answer == b"PONG"


@pytest.mark.parametrize("garbage", [b"hello\r\n", b"+PONG\r\n+PONG\r\n", b"*-7\r\n", b""])
async def test_what_is_no_answer_ends_the_connection_and_not_the_pipe(garbage: bytes) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(garbage)
        await writer.drain()

    async with server(hang_up, saying(b"+PONG\r\n")) as url, pipe_to(url) as pipe:
        async with asyncio.timeout(30):
            if not garbage.startswith(b"+PONG"):
                with pytest.raises(StoreConnectionError):
                    await pipe.call("PING")
            else:  # the first is as good as any; the second ends the connection
                assert await pipe.call("PING") == b"PONG"
            answer: object = None
            while answer is None:
                try:
                    answer = await pipe.call("PING")
                except StoreConnectionError:
                    await asyncio.sleep(0.001)
        assert answer == b"PONG"


async def test_a_password_that_is_refused_is_an_error_of_every_call(store: EmbeddedStore) -> None:
    wrong = store.url.replace("unix://", "unix://nobody:wrong@")
    async with pipe_to(wrong) as pipe:
        for _ in range(2):
            with pytest.raises(ResponseError):
                await pipe.call("PING")
