"""Channels to processes of one's own cluster, with TLS where its configuration says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc

from services.common.clock import SystemClock
from services.common.config import TlsSettings
from services.runtime.tls import cluster_identity, door_identity, pinned_credentials

Options: TypeAlias = Sequence[tuple[str, int | str]]
Dial: TypeAlias = Callable[[str, Options], grpc.Channel]

_NAME = "grpc.ssl_target_name_override"


def plaintext(address: str, options: Options = ()) -> grpc.Channel:
    """Open a channel without TLS."""
    return grpc.insecure_channel(address, options=options)


def dial_worker(tls: TlsSettings) -> Dial:
    """Say how a worker is reached; raises ConfigError."""
    identity = cluster_identity(tls, SystemClock())
    if identity is None:
        return plaintext

    def dial(address: str, options: Options = ()) -> grpc.Channel:
        options = (*options, (_NAME, tls.worker_name))
        return grpc.secure_channel(address, identity.channel_credentials(), options)

    return dial


def dial_router(tls: TlsSettings) -> Dial:
    """Say how a router of this machine is reached, by the certificate it is configured with.

    Its authority need not be known here, and its names need not be those of this machine.
    """
    identity = door_identity(tls, SystemClock())
    if identity is None:
        return plaintext

    def dial(address: str, options: Options = ()) -> grpc.Channel:
        material = identity.material()
        names = [(_NAME, name) for name in material.names[:1]]
        return grpc.secure_channel(address, pinned_credentials(material), (*options, *names))

    return dial
