"""Generate services/pb from protos/ (checked in; `make protos` must leave no diff)."""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "services" / "pb"
# protoc writes imports by proto package; our import path is the file path.
IMPORT = re.compile(r"^(from|import) isthmus\.v1(\b)", re.MULTILINE)


def main() -> int:
    """Run protoc for every proto, then rewrite the one import prefix."""
    protos = sorted((ROOT / "protos" / "isthmus" / "v1").glob("*.proto"))
    include = str(resources.files("grpc_tools") / "_proto")
    tmp = OUT / "_gen"
    tmp.mkdir(parents=True, exist_ok=True)
    args = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"-I{include}",
        f"--python_out={tmp}",
        f"--grpc_python_out={tmp}",
        f"--mypy_out={tmp}",
        f"--mypy_grpc_out={tmp}",
        *[str(p) for p in protos],
    ]
    if protoc.main(args) != 0:
        return 1
    for old in OUT.glob("*_pb2*"):
        old.unlink()
    for path in sorted((tmp / "isthmus" / "v1").iterdir()):
        text = IMPORT.sub(r"\1 services.pb\2", path.read_text())
        text = text.replace("isthmus.v1.", "services.pb.") if path.suffix == ".pyi" else text
        (OUT / path.name).write_text(text)
        path.unlink()
    for folder in (tmp / "isthmus" / "v1", tmp / "isthmus", tmp):
        folder.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
