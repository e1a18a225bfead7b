"""Clusters to test on: the stand-in, and for helm and kubectl the one that KUBECONFIG names."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakekube.kube import FakeKube
from tests.fakekube.programs import Programs
from tests.fakekube.serving import serving, write_kubeconfig


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[FakeKube]:
    """The stand-in, one for each test."""
    async with serving(FakeKube(), tmp_path) as kube:
        yield kube


@pytest.fixture
def programs(kube: FakeKube, tmp_path: Path) -> Programs:
    """Both programs as the stand-in's administrator."""
    config = write_kubeconfig(tmp_path / "kubeconfig", kube.url, kube.ca_file, kube.admin_token)
    return Programs(config, tmp_path / "home")


@pytest.fixture
async def anywhere(tmp_path: Path) -> AsyncIterator[Programs]:
    """Both programs in a namespace of their own, on a real cluster where one is named."""
    space = f"isthmus-test-{secrets.token_hex(4)}"
    real = os.environ.get("KUBECONFIG")
    if real:
        programs = Programs(Path(real), tmp_path / "home", space)
        await programs.kubectl("create", "namespace", space)
        try:
            yield programs
        finally:
            await programs.kubectl("delete", "namespace", space, "--wait=false")
        return
    async with serving(FakeKube(), tmp_path) as kube:
        kube.add("v1", "Namespace", space)
        path = tmp_path / "kubeconfig"
        config = write_kubeconfig(path, kube.url, kube.ca_file, kube.admin_token)
        yield Programs(config, tmp_path / "home", space)
