"""mTLS between router and workers: identities, refusals, rotation under load."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from services.pb import worker_pb2, worker_pb2_grpc
from services.router.config import LinkConfig, LinkTls, RouterConfig
from services.router.link import LinkBroken, is_loopback_address, open_channel
from services.runtime.dev_certs import make_dev_certs
from tests.support.certs import LEAVES, client_credentials, identity, make_certs
from tests.support.cluster import Cluster, eventually, make_call, reference, running_cluster
from tests.support.fake_worker import FakeWorker, decode_worker, prefill_worker
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make_certs(tmp_path)
    return tmp_path


def worker(certs: Path, worker_id: str, role: str, name: str = "worker") -> FakeWorker:
    make = decode_worker if role == "decode" else prefill_worker
    return make(worker_id, tls=identity(certs, name))


def routed(certs: Path, name: str = "router") -> RouterConfig:
    tls = LinkTls(identity(certs, name), "isthmus-worker")
    return RouterConfig(link=LinkConfig(tls=tls))


def detail_of(cluster: Cluster, worker_id: str) -> str:
    """Why the Link to a worker is down."""
    link = cluster.router._cluster.link(worker_id)  # type: ignore[arg-type]
    return "" if link is None else link.state().detail


async def test_router_and_workers_know_each_other(store_url: str, certs: Path) -> None:
    workers = [worker(certs, "p0", "prefill"), worker(certs, "d0", "decode")]
    async with running_cluster(store_url, workers, routed(certs)) as cluster:
        call = make_call(force_mode="REMOTE")
        answer = await cluster.ask(call)
        assert answer.tokens() == reference(call)
        assert answer.end.timing.mode == "REMOTE"


@pytest.mark.parametrize(
    ("router_as", "worker_as", "why"),
    [
        ("other", "worker", "permission_denied"),  # a certificate of the cluster, not a router's
        ("router", "other", "unavailable"),  # whoever answers is not a worker
    ],
)
async def test_a_certificate_in_another_name_makes_no_link(
    store_url: str, certs: Path, router_as: str, worker_as: str, why: str
) -> None:
    good = worker(certs, "d0", "decode")
    config = routed(certs, router_as)
    async with running_cluster(store_url, [], config) as cluster:
        await cluster.add(worker(certs, "p0", "prefill", worker_as))
        await eventually(lambda: why in detail_of(cluster, "p0"), 10)
        assert cluster["p0"].num_attaches == 0
        assert cluster.state_of("p0") != "live"
    assert good.num_attaches == 0


async def test_a_certificate_of_another_authority_makes_no_link(
    store_url: str, certs: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    make_certs(foreign)
    async with running_cluster(store_url, [], routed(foreign)) as cluster:
        await cluster.add(worker(certs, "p0", "prefill"))
        await eventually(lambda: "unavailable" in detail_of(cluster, "p0"), 10)
        assert cluster["p0"].num_attaches == 0


async def test_worker_denies_every_call_but_what_the_certificate_allows(certs: Path) -> None:
    """Default deny, by certificate: none, a peer's, a router's."""
    p0 = worker(certs, "p0", "prefill")
    await p0.start()
    try:
        for name, status, link in (
            ("", grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
            ("other", grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED),
            ("router", grpc.StatusCode.OK, grpc.StatusCode.OK),
        ):
            options = [("grpc.ssl_target_name_override", "isthmus-worker")]
            async with grpc.aio.secure_channel(
                p0.address, client_credentials(certs, name), options=options
            ) as channel:
                stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
                assert await code_of(stub.Status(worker_pb2.StatusRequest(), timeout=5)) is status
                is_allowed = link is grpc.StatusCode.OK
                assert await code_of(first_of(stub, says_hello=is_allowed)) is link, name
    finally:
        await p0.stop()


async def first_of(stub: worker_pb2_grpc.WorkerAsyncStub, *, says_hello: bool) -> None:
    """Open a Link; a write that met its refusal half way would end it with a code of gRPC's own."""
    call = stub.Link(timeout=20)
    try:
        if says_hello:
            attach = worker_pb2.Attach(proto_min=1, proto_max=1, router_incarnation=7)
            await call.write(worker_pb2.RouterFrame(attach=attach))
        await call.read()
    finally:
        call.cancel()


async def code_of(call: object) -> grpc.StatusCode:
    try:
        await call  # type: ignore[misc]  # an awaitable of either kind
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.OK


async def test_rotation_under_load_fails_no_request(store_url: str, certs: Path) -> None:
    """RB-093: open Links go on; a worker that comes back is met with the new certificates."""
    workers = [worker(certs, "p0", "prefill"), worker(certs, "d0", "decode")]
    async with running_cluster(store_url, workers, routed(certs)) as cluster:
        gate = asyncio.Event()

        async def load() -> int:
            count = 0
            while not gate.is_set() or count < 5:
                call = make_call()
                assert (await cluster.ask(call)).tokens() == reference(call)
                count += 1
            return count

        running = asyncio.create_task(load())
        await eventually(lambda: workers[0].jobs)
        make_certs(certs)
        port = workers[0].port
        await cluster.add(worker(certs, "p1", "prefill"))
        await cluster.until_state("p1", "live", 10)
        assert port == workers[0].port
        gate.set()
        assert await running >= 5
        assert [w.num_attaches for w in workers] == [1, 1]
        cluster.assert_clean()


def test_plaintext_leaves_this_machine_only_when_said_so() -> None:
    config = LinkConfig()
    with pytest.raises(LinkBroken, match=r"auth\.allow_plaintext"):
        open_channel("10.0.0.7:50051", config)
    for address in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"):
        assert is_loopback_address(address)
    for address in ("10.0.0.7:1", "worker:1", "127.0.0.1.example:1", "0.0.0.0:1", "x"):
        assert not is_loopback_address(address)
    assert replace(config, allow_plaintext=True).allow_plaintext


async def test_an_expired_certificate_makes_no_link(
    store_url: str, certs: Path, tmp_path: Path
) -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    make_dev_certs(certs, LEAVES, 1, past)
    async with running_cluster(store_url, [], routed(certs)) as cluster:
        await cluster.add(worker(certs, "p0", "prefill"))
        await eventually(lambda: "unavailable" in detail_of(cluster, "p0"), 10)
        make_certs(certs)  # renewed in place, nothing is restarted
        await cluster.until_state("p0", "live", 10)


async def test_the_authority_changes_while_both_are_known(
    store_url: str, certs: Path, tmp_path: Path
) -> None:
    """RB-093: old and new authority in one file, until every certificate is of the new one."""
    new = tmp_path / "new"
    make_certs(new)
    workers = [worker(certs, "p0", "prefill"), worker(certs, "d0", "decode")]
    async with running_cluster(store_url, workers, routed(certs)) as cluster:
        both = (certs / "ca.pem").read_text() + (new / "ca.pem").read_text()
        (certs / "ca.pem").write_text(both)
        for name in ("router", "worker"):
            for end in ("key", "pem"):
                (certs / f"{name}.{end}").write_bytes((new / f"{name}.{end}").read_bytes())
        # It has a certificate of the new authority, and so has the router by now.
        await cluster.add(worker(certs, "p1", "prefill"))
        await cluster.until_state("p1", "live", 10)
        call = make_call()
        assert (await cluster.ask(call)).tokens() == reference(call)
        assert [w.num_attaches for w in workers] == [1, 1]
