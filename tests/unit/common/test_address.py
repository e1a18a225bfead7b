from __future__ import annotations

import socket

import pytest

from services.common.address import family_of, join_host_port


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
