from __future__ import annotations

import socket
import struct

import pytest

from services.common.address import HeldPort, family_of, join_host_port, split_host_port


@pytest.mark.parametrize(
    ("host", "written", "family"),
    [
        ("127.0.0.1", "127.0.0.1:80", socket.AF_INET),
        ("worker-0.example", "worker-0.example:80", socket.AF_INET),
        ("::1", "[::1]:80", socket.AF_INET6),
        ("[::1]", "[::1]:80", socket.AF_INET6),
    ],
)
def test_only_ipv6_hosts_get_brackets(
    host: str, written: str, family: socket.AddressFamily
) -> None:
    assert join_host_port(host, 80) == written
    assert family_of(host) is family


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("::1:7", ("::1", 7))],
)
def test_host_and_port_are_read_with_and_without_brackets(
    address: str, parts: tuple[str, int]
) -> None:
    assert split_host_port(address) == parts


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:x", "unix:/a/b"])
def test_what_is_no_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_host_port(address)


def test_held_port_is_nobodys_but_a_listeners_that_asks_for_it() -> None:
    """`isthmus up` drew a port, and a connection took it before the worker listened."""
    held = HeldPort("127.0.0.1")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert not _connects_from(held.number, server)
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", held.number))
        with (
            socket.create_server(("127.0.0.1", held.number)) as listener,
            socket.create_connection(listener.getsockname(), 5),
        ):
            pass
    finally:
        held.release()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert _connects_from(held.number, server)


def _connects_from(port: int, server: socket.socket) -> bool:
    """Connect with one port to draw from (IP_LOCAL_PORT_RANGE, Linux 6.3)."""
    with socket.socket() as client:
        try:
            client.setsockopt(socket.IPPROTO_IP, 51, struct.pack("=I", port | port << 16))
        except OSError:
            pytest.skip("this kernel has no port range of a socket")
        try:
            client.connect(server.getsockname())
        except OSError:
            return False
        return bool(client.getsockname()[1] == port)
