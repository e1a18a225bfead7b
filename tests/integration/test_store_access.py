"""What users of the store may do: the ACL lines of the docs, TLS, on every server that is here."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from services.common.address import free_port
from services.common.clock import SystemClock
from services.common.errors import StoreUnavailable
from services.registry.base import LoadReport
from services.registry.cost import Ask, Candidate, Weights
from services.registry.embedded import server_binary
from services.registry.lease import WorkerLease
from services.registry.reader import RedisRegistryReader
from services.registry.scaling import Leadership, ScalingStore
from services.registry.schema import Keys
from services.registry.scripts import RouteAsk
from services.registry.store_client import StoreAddress
from services.runtime.process import wait_or_kill
from tests.support.certs import make_certs
from tests.support.cluster import eventually
from tests.support.registry import make_chain, make_worker_info
from tests.support.source_tree import ROOT

pytestmark = pytest.mark.integration

DOCS = ROOT / "docs/operations/store.md"
SCRIPTS = ROOT / "services/registry"
CHAIN = make_chain(1, 64)


def debian_server() -> Path:
    """Return Debian's redis-server, or skip."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    return Path(found)


@contextmanager
def running(binary: Path, *arguments: str, url: str = "") -> Iterator[str]:
    """Run a server on a port of its own; yield its address."""
    folder, port = Path(tempfile.mkdtemp(prefix="isthmus-store-")), free_port("127.0.0.1")
    listen = ("--port", "0", "--tls-port", str(port)) if url else ("--port", str(port))
    process = subprocess.Popen(
        [
            str(binary), *listen, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(folder), "--logfile", str(folder / "log"), *arguments,
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 10
        while not (folder / "log").exists() or "eady to accept" not in (folder / "log").read_text():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.01)
        yield (url or "redis://127.0.0.1:{port}").format(port=port)
    finally:
        process.terminate()
        wait_or_kill(process, 5.0)
        shutil.rmtree(folder, ignore_errors=True)


def execute(client: redis.Redis, *words: str | int) -> object:
    """Send a command as it is."""
    send: Any = client.execute_command  # not typed in the redis package
    return send(*words)


def documented_lines() -> list[list[str]]:
    """Return the ACL commands of the docs, as words."""
    return [line.split() for line in DOCS.read_text().splitlines() if line.startswith("ACL ")]


async def use_everything(address: StoreAddress) -> None:
    """Run every script once as processes do: a worker's life, a decision, its end."""
    lease = WorkerLease(
        address, "acl", make_worker_info(), LoadReport, lambda: CHAIN[:8], SystemClock()
    )
    reader = RedisRegistryReader(address, "acl", SystemClock())
    lease.start()
    try:
        await eventually(lambda: lease.is_registered, 10.0)
        lease.publish(CHAIN[8:16], CHAIN[:4])
        await eventually(lambda: lease.renewals["ok"], 10.0)
        (record,) = await reader.snapshot()
        candidate = Candidate(record.slot, record.slot_gen, is_prefill=False, seed=1)
        ask = RouteAsk(Ask(64, 8, 72), b"01234567" * 9, "rid")
        (verdict,) = await reader.route(Weights(), (candidate,), {}, (ask,))
        assert verdict is not None
        await reader.hold(["rid"])
        scaling = ScalingStore(Keys("acl"), reader.run, timeout_s=10.0)
        await scaling.tell("r0", "word")
        assert len(await scaling.told()) == 1
        led = await scaling.lead("a", 1000, 0)
        assert isinstance(led, Leadership)
        assert await scaling.keep("a", led.token, {"status": "s"})
        assert await scaling.status() == "s"
        await reader.release([("rid", b"01234567")])
    finally:
        lease.stop(10.0)
        await reader.close()


def test_documented_user_has_the_commands_of_the_scripts_and_no_more() -> None:
    """Least privilege: a command a script begins to use, or stops using, changes the docs."""
    called = {
        name.lower()
        for file in SCRIPTS.glob("*.lua")
        for name in re.findall(r"\bcall\('(\w+)'", file.read_text())
    }
    user, loader = documented_lines()
    granted = {word[1:] for word in user if word.startswith("+")}
    assert granted == called | {"ping", "hello", "evalsha"}
    assert {word for word in loader if word[0] in "+~"} == {"+ping", "+hello", "+script|load"}


@pytest.mark.parametrize("server", [server_binary, debian_server], ids=["valkey", "debian"])
async def test_documented_users_can_do_their_work_and_nothing_else(server: object) -> None:
    """Neither EVAL nor SCRIPT for the user of every day, no key for the loader."""
    assert callable(server)
    with running(server()) as url, closing(redis.Redis.from_url(url)) as admin:
        for words in documented_lines():
            assert execute(admin, *words) == b"OK"
        host = url.removeprefix("redis://")
        user = f"redis://isthmus:CHANGE-ME@{host}"
        loader = f"redis://isthmus-loader:CHANGE-ME-TOO@{host}"
        await use_everything(StoreAddress(user, loader))
        execute(admin, "ACL", "LOG", "RESET")
        admin.flushall()
        admin.script_flush()
        await use_everything(StoreAddress(user, loader))
        assert execute(admin, "ACL", "LOG") == [], "a refused command is one too many"
        forbidden = {
            user: (("EVAL", "return 1", 0), ("SCRIPT", "LOAD", "return 1"), ("FLUSHALL",),
                   ("CONFIG", "GET", "*"), ("GET", "other"), ("KEYS", "*"), ("ACL", "LIST")),
            loader: (("EVAL", "return 1", 0), ("GET", "isthmus:{acl}:ver"), ("SCRIPT", "FLUSH"),
                     ("EVALSHA", "0" * 40, 0)),
        }  # fmt: skip
        for address, commands in forbidden.items():
            with closing(redis.Redis.from_url(address, driver_info=None, protocol=2)) as client:
                for command in commands:
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        execute(client, *command)


async def test_without_a_loader_a_store_that_forgot_its_scripts_is_not_used() -> None:
    """It is a failure of the store, which requests survive, and no crash."""
    with running(server_binary()) as url, closing(redis.Redis.from_url(url)) as admin:
        for words in documented_lines():
            execute(admin, *words)
        user = url.replace("redis://", "redis://isthmus:CHANGE-ME@")
        wrong = url.replace("redis://", "redis://isthmus-loader:wrong@")
        await expect_refused(StoreAddress(user, wrong))


def tls_arguments(certs: Path, leaf: str) -> tuple[str, ...]:
    """Return what makes a server speak TLS under a leaf's names."""
    return (
        "--tls-cert-file", str(certs / f"{leaf}.pem"), "--tls-key-file", str(certs / f"{leaf}.key"),
        "--tls-ca-cert-file", str(certs / "ca.pem"), "--tls-auth-clients", "no",
    )  # fmt: skip


async def test_tls_is_used_where_the_authority_and_the_name_are_right(tmp_path: Path) -> None:
    make_certs(tmp_path)
    url, ca_file = "rediss://127.0.0.1:{port}", str(tmp_path / "ca.pem")
    with running(debian_server(), *tls_arguments(tmp_path, "doors"), url=url) as right:
        await use_everything(StoreAddress(right, ca_file=ca_file))
        await expect_refused(StoreAddress(right))  # the system does not know the authority
    with running(debian_server(), *tls_arguments(tmp_path, "router"), url=url) as misnamed:
        await expect_refused(StoreAddress(misnamed, ca_file=ca_file))


async def expect_refused(address: StoreAddress) -> None:
    """Hold the client to not speaking to this server."""
    reader = RedisRegistryReader(address, "acl", SystemClock())
    with pytest.raises(StoreUnavailable):
        await reader.snapshot()
    await reader.close()
