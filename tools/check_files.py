"""Check files before a commit: text ends with one newline, nothing huge, syntax of data files."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

MAX_BYTES = 512 << 10
TEXT_SUFFIXES = frozenset(
    {".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".json", ".proto", ".c", ".h", ".lua", ".lock"}
)
PARSERS: dict[str, Callable[[str], object]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": lambda text: list(yaml.safe_load_all(text)),
    ".yml": lambda text: list(yaml.safe_load_all(text)),
}


def faults(path: Path) -> list[str]:
    """Everything wrong with one file."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        return [f"{path}: {size >> 10} KiB, limit {MAX_BYTES >> 10} KiB"]
    if path.suffix not in TEXT_SUFFIXES:
        return []
    found = []
    text = path.read_text(encoding="utf-8")
    if text and (not text.endswith("\n") or text.endswith("\n\n")):
        found.append(f"{path}: must end with exactly one newline")
    if "\r" in text:
        found.append(f"{path}: carriage returns")
    if any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in text.splitlines()):
        found.append(f"{path}: conflict markers")
    parser = PARSERS.get(path.suffix)
    # Helm templates look like YAML and are not.
    if parser is not None and "templates" not in path.parts:
        try:
            parser(text)
        except (ValueError, yaml.YAMLError) as error:
            found.append(f"{path}: {error}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Check the given files."""
    found = [fault for name in arguments for fault in faults(Path(name))]
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
