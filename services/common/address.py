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


class HeldPort:
    """A free port of a host, kept free until `release` for a process that will listen there.

    The socket is bound and does not listen: the kernel draws its port for nobody else, neither for
    a listener nor for a connection, and lets whoever asks for it by number listen with
    SO_REUSEADDR, as servers do.
    """

    def __init__(self, host: str) -> None:
        """Draw the port."""
        self._socket = socket.socket(family_of(host))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
        except BaseException:
            self._socket.close()
            raise
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Let anybody have it; idempotent."""
        self._socket.close()


def free_port(host: str) -> int:
    """Draw a port that is free at this moment."""
    with socket.socket(family_of(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
