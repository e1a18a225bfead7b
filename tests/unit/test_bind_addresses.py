"""RB-122: nothing in the tree binds to all interfaces, not by default and not by a setting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError
from services.transfer.config import TransferConfig
from services.transfer.zmq_plane import check_host
from tests.support.source_tree import faults_in

FOLDERS = ("services", "kernels", "loadtest", "tools")
# An address as text, with or without scheme and port, that means every interface.
_ALL = re.compile(r"^([a-z]+://)?(0\.0\.0\.0|\*|\[::\]|::)(:\S*)?$")
_NAMES = frozenset({"INADDR_ANY", "in6addr_any"})
_BINDERS = frozenset(
    {"bind", "create_server", "start_server", "add_insecure_port", "add_secure_port", "listen"}
)


def faults(source: str) -> Iterator[str]:
    """Every literal, name and empty host of a bind call that means all interfaces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _ALL.match(node.value) and node.value not in ("*", "::", ":"):
                yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in _NAMES:
                yield f"{node.lineno}: {name}"
        elif isinstance(node, ast.Call):
            yield from _call_faults(node)


def _call_faults(node: ast.Call) -> Iterator[str]:
    if ast.unparse(node.func).rpartition(".")[2] not in _BINDERS:
        return
    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
        host = argument.elts[0] if isinstance(argument, ast.Tuple) and argument.elts else argument
        if isinstance(host, ast.Constant) and host.value in ("", "*", "::"):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_tree_binds_nowhere_to_all_interfaces() -> None:
    assert faults_in(FOLDERS, faults) == []


@pytest.mark.parametrize(
    "source",
    [
        "host = '0.0.0.0'",
        "socket.bind('tcp://*:5555')",
        "socket.bind('tcp://0.0.0.0:5555')",
        "server.add_insecure_port('[::]:0')",
        "listener.bind(('', 80))",
        "listener.bind(('::', 80))",
        "asyncio.start_server(serve, '')",
        "asyncio.start_server(serve, host='')",
        "listener.bind((socket.INADDR_ANY, 80))",
    ],
)
def test_scan_finds_what_it_looks_for(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize(
    "source", ["bind(('127.0.0.1', 0))", "pattern = '*'", "names.split('::')", "text = ':0'"]
)
def test_scan_lets_harmless_text_pass(source: str) -> None:
    assert list(faults(source)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "0"])
def test_no_setting_lets_a_worker_bind_everywhere(host: str) -> None:
    flags = {
        "worker.bind_host": host,
        "auth.allow_plaintext": True,
        "transfer.allow_plaintext_kv": True,
    }
    with pytest.raises(ConfigError, match="one address"):
        load_config(None, {}, flags)
    with pytest.raises(ConfigError, match=r"one address|not an IP address"):
        check_host(host, TransferConfig(allow_plaintext_kv=True))
