"""Certificates for tests, from an authority of their own."""

from __future__ import annotations

import datetime
from pathlib import Path

import grpc

from services.common.clock import SystemClock
from services.runtime.dev_certs import Leaf, make_dev_certs
from services.runtime.tls import TlsFiles, TlsIdentity

LEAVES = (
    Leaf("doors", ("localhost", "127.0.0.1")),
    Leaf("router", ("isthmus-router",)),
    Leaf("worker", ("isthmus-worker",)),
    Leaf("other", ("isthmus-other",)),
)


def make_certs(directory: Path, *, days: int = 1) -> None:
    """Make the authority and all leaves, or, called again, the leaves anew."""
    make_dev_certs(directory, LEAVES, days, datetime.datetime.now(datetime.UTC))


def identity(directory: Path, name: str, *, ca: bool = True) -> TlsIdentity:
    """A leaf as a process has it; looks at its files at every handshake."""
    files = TlsFiles(
        directory / f"{name}.pem", directory / f"{name}.key", directory / "ca.pem" if ca else None
    )
    return TlsIdentity(f"tls.{name}", files, SystemClock(), poll_s=0.0)


def client_credentials(directory: Path, name: str = "") -> grpc.ChannelCredentials:
    """What a client that knows the authority shows: a leaf, or nothing."""
    ca = (directory / "ca.pem").read_bytes()
    if not name:
        return grpc.ssl_channel_credentials(ca)
    key, chain = (directory / f"{name}.{end}" for end in ("key", "pem"))
    return grpc.ssl_channel_credentials(ca, key.read_bytes(), chain.read_bytes())
