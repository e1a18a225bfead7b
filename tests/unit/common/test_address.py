from __future__ import annotations

import socket

import pytest

from services.common.address import family_of, join_host_port, split_host_port


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
