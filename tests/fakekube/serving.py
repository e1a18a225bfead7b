"""The stand-in at an address, and what points clients to it."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from services.runtime.dev_certs import Leaf, make_dev_certs
from tests.fakekube.kube import FakeKube
from tests.fakekube.server import Server

_LAST_TURNS = 10  # of the loop, in which clients in it see that their connections have ended


def write_kubeconfig(
    path: Path, url: str, ca_file: Path, token: str, namespace: str = "default"
) -> Path:
    """Write what kubectl, helm and the Python client are pointed at a cluster by."""
    cluster = {"server": url, "certificate-authority": str(ca_file)}
    context = {"cluster": "fake", "user": "fake", "namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": cluster}],
        "users": [{"name": "fake", "user": {"token": token}}],
        "contexts": [{"name": "fake", "context": context}],
    }
    path.write_text(json.dumps(config))
    return path


@asynccontextmanager
async def serving(kube: FakeKube, folder: Path) -> AsyncIterator[FakeKube]:
    """Serve over TLS on a free port of loopback; its certificates lie in the folder."""
    now = datetime.datetime.now(datetime.UTC)
    make_dev_certs(folder, (Leaf("kube", ("127.0.0.1", "localhost")),), 1, now)
    kube.ca_file = folder / "ca.pem"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "kube.pem", folder / "kube.key")
    runner = web.AppRunner(
        Server(kube).app(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    kube.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    kube.settle()
    try:
        yield kube
    finally:
        kube.close()
        # A client that is gone does not answer the end of TLS, and nobody is to wait for it.
        for connection in list(runner.server.connections if runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        for _ in range(_LAST_TURNS):
            await asyncio.sleep(0)
