"""RB-121: nothing in the tree turns bytes from outside into code or objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.source_tree import faults_in

FOLDERS = ("services", "kernels", "loadtest", "tools", "tests")
MODULES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"})
CALLS = frozenset({"eval", "exec", "compile"})
METHODS = frozenset(
    {
        "recv_pyobj",
        "send_pyobj",
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "torch.save",
        "numpy.fromfile",
        "os.system",
        "os.popen",
    }
)


def faults(source: str) -> Iterator[str]:
    """Every forbidden import or call in one file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            yield from (f"{node.lineno}: import {name}" for name in names if name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"{node.lineno}: from {node.module}"
        elif isinstance(node, ast.Call):
            fault = _call_fault(node)
            if fault:
                yield f"{node.lineno}: {fault}"


def _call_fault(node: ast.Call) -> str:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if name in CALLS or name in METHODS or last in METHODS:
        return f"{name}()"
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name == "torch.load" and keywords.get("weights_only") != "True":
        return "torch.load() without weights_only=True"
    if last == "load" and name.startswith(("np.", "numpy.")) and "allow_pickle" in keywords:
        return f"{name}(allow_pickle=...)"
    if keywords.get("shell") == "True":
        return f"{name}(shell=True)"
    return ""


def test_tree_has_no_forbidden_call() -> None:
    assert faults_in(FOLDERS, faults) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval('1')",
        "socket.recv_pyobj()",
        "yaml.load(text, Loader=yaml.Loader)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_scan_finds_what_it_looks_for(source: str) -> None:
    assert len(list(faults(source))) == 1


@pytest.mark.parametrize(
    "source",
    ["re.compile('x')", "model.eval()", "torch.load(p, weights_only=True)", "yaml.safe_load(t)"],
)
def test_scan_lets_harmless_calls_pass(source: str) -> None:
    assert list(faults(source)) == []
