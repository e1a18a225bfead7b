"""How hosts and ports are written, IPv6 included."""

from __future__ import annotations

import socket


def join_host_port(host: str, port: int) -> str:
    """Write host:port, with brackets where the host has colons itself."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Read host:port, the host without brackets; ValueError on anything else."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of sockets bound to an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    """Draw a port that is free at this moment."""
    with socket.socket(family_of(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
