"""Generate services/pb from protos/ (checked in); `--check` says whether it is up to date."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "services" / "pb"
PACKAGE = Path("isthmus") / "v1"
# protoc writes imports by proto package; our import path is the file path.
IMPORT = re.compile(r"^(from|import) isthmus\.v1(\b)", re.MULTILINE)


def generate(folder: Path) -> dict[str, str]:
    """Run protoc for every proto into `folder`; file name -> text with rewritten imports."""
    protos = sorted((ROOT / "protos" / PACKAGE).glob("*.proto"))
    include = str(resources.files("grpc_tools") / "_proto")
    args = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"-I{include}",
        f"--python_out={folder}",
        f"--grpc_python_out={folder}",
        f"--mypy_out={folder}",
        f"--mypy_grpc_out={folder}",
        *[str(path) for path in protos],
    ]
    # The plugins lie beside the interpreter, whether or not its environment is active.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")
    files = {}
    for path in sorted((folder / PACKAGE).iterdir()):
        text = IMPORT.sub(r"\1 services.pb\2", path.read_text())
        if path.suffix == ".pyi":
            text = text.replace("isthmus.v1.", "services.pb.")
        files[path.name] = text
    return files


def main(arguments: Sequence[str]) -> int:
    """Write the files, or with --check name those that differ."""
    with tempfile.TemporaryDirectory() as folder:
        files = generate(Path(folder))
    present = {path.name: path.read_text() for path in OUT.glob("*_pb2*")}
    if "--check" in arguments:
        stale = sorted(
            name for name in files.keys() | present.keys() if files.get(name) != present.get(name)
        )
        for name in stale:
            print(f"services/pb/{name} is out of date: run `make protos`")
        return 1 if stale else 0
    for name in present.keys() - files.keys():
        (OUT / name).unlink()
    for name, text in files.items():
        (OUT / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
