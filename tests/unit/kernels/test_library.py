"""Building, loading and doing without the CPU library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from kernels.cpu import build, library

ROOT = Path(__file__).parents[3]
QUICK = build.KV_BLOCKS  # builds in a tenth of the other library's time


def run_python(code: str, **environ: str) -> str:
    """Run `code` in a process of its own, since a process loads the library once."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path), "PATH": os.environ["PATH"]}


def needs_compiler(environ: dict[str, str]) -> None:
    try:
        build.find_compiler(environ)
    except build.BuildFailed as error:
        pytest.skip(str(error))


def test_builds_once_and_leaves_only_the_library(environ: dict[str, str]) -> None:
    needs_compiler(environ)

    first = build.build(environ, QUICK)
    stamp = first.stat().st_mtime_ns
    second = build.build(environ, QUICK)

    assert second == first
    assert second.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [build.library_file(QUICK)]


def test_concurrent_builds_agree(environ: dict[str, str]) -> None:
    needs_compiler(environ)
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: build.build(environ, QUICK), range(2)))
    (path,) = paths
    assert [entry.name for entry in path.parent.iterdir()] == [build.library_file(QUICK)]


def test_compiler_without_openmp_or_native_flags_still_builds(
    environ: dict[str, str], tmp_path: Path
) -> None:
    needs_compiler(environ)
    real = build.find_compiler(environ)[0]
    picky = tmp_path / "picky-cc"
    picky.write_text(
        '#!/bin/sh\nfor a in "$@"; do case $a in -fopenmp|-march=native) '
        f'echo "error: unknown $a" >&2; exit 1;; esac; done\nexec {real} "$@"\n'
    )
    picky.chmod(0o755)
    code = "from kernels.cpu import library; print(library.available())"

    shown = run_python(code, CC=str(picky), XDG_CACHE_HOME=environ["XDG_CACHE_HOME"])

    assert shown.startswith("(True, ")
    assert "1 threads" in shown


def test_says_so_when_there_is_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(build.BuildFailed, match="no C compiler found"):
        build.build({"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})


def test_says_what_the_compiler_said(environ: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.c:1: error: no good" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    with pytest.raises(build.BuildFailed, match=r"cannot compile .*error: no good"):
        build.build(environ | {"CC": str(broken)})
    assert list((tmp_path / "isthmus").rglob("*.so")) == []


def test_unwritable_cache_is_a_reason_not_a_crash(environ: dict[str, str]) -> None:
    needs_compiler(environ)
    with pytest.raises(build.BuildFailed, match="cannot write to"):
        build.build(environ | {"XDG_CACHE_HOME": "/proc/nowhere"})


def test_cache_others_can_write_to_is_refused(environ: dict[str, str]) -> None:
    needs_compiler(environ)
    folder = build.build(environ, QUICK).parent
    folder.chmod(0o777)
    with pytest.raises(build.BuildFailed, match="writable by another user"):
        build.build(environ, QUICK)


def test_keeps_a_bounded_number_of_builds(tmp_path: Path) -> None:
    folders = [tmp_path / f"build-{i:02}" for i in range(20)]
    for age, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (1e9 - age, 1e9 - age))

    build.prune(tmp_path, keep=folders[19])

    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"build-{i:02}" for i in (*range(15), 19)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_keep_every_promise(flags: str) -> None:
    needs_compiler(dict(os.environ))
    compiler = build.find_compiler(os.environ)[0]
    arguments = ["-q", "-p", "no:cacheprovider", "tests/unit/kernels/test_batch_invariance.py"]
    code = (
        "import pytest\nfrom kernels.cpu import library\n"
        f"print(library.available())\nraise SystemExit(pytest.main({arguments!r}))"
    )

    shown = run_python(code, CC=f"{compiler} {flags}", ISTHMUS_CPU_KERNELS="on")

    assert "C library" in shown
    assert "AVX-512" not in shown
    assert " passed" in shown


def test_damaged_library_is_built_again(environ: dict[str, str]) -> None:
    needs_compiler(environ)
    folder = build.cache_root(environ) / build.build_key(build.find_compiler(environ))
    folder.mkdir(mode=0o700, parents=True)
    path = folder / build.library_file(build.OPS)
    path.write_bytes(b"not a library")
    code = "from kernels.cpu import library; print(library.available()[0])"
    assert run_python(code, XDG_CACHE_HOME=environ["XDG_CACHE_HOME"]).strip() == "True"
    assert path.stat().st_size > 1000


def test_reference_serves_when_switched_off() -> None:
    code = (
        "import torch\nfrom kernels import dispatch\nfrom kernels.ops.linear import *\n"
        "p = pack_linear(torch.eye(3))\nassert p.panels is None\n"
        "print(linear(torch.ones(2, 3), p).sum().item(), dispatch.describe('cpu'))"
    )
    shown = run_python(code, ISTHMUS_CPU_KERNELS="off")
    assert shown.strip() == (
        "6.0 plain torch reference (ISTHMUS_CPU_KERNELS turns the C library off)"
    )


def test_key_depends_on_the_compiler(environ: dict[str, str]) -> None:
    needs_compiler(environ)
    compiler = build.find_compiler(environ)
    assert build.build_key(compiler) != build.build_key([*compiler, "-g"])


def test_describe_names_the_path_in_use() -> None:
    usable, reason = library.available()
    assert dispatch.describe("cpu") == (reason if usable else f"plain torch reference ({reason})")
    assert "reference" in dispatch.describe(torch.device("meta"))


def test_thread_count_is_checked_and_kept() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        library.set_num_threads(0)
    kernels = library.kernels()
    if kernels is None:
        pytest.skip(library.available()[1])
    before, torch_before = kernels.get_num_threads(), torch.get_num_threads()
    dispatch.set_num_threads(3)
    assert (kernels.get_num_threads(), torch.get_num_threads()) == (3, 3)
    library.set_num_threads(before)
    torch.set_num_threads(torch_before)


def test_errors_that_need_the_data_are_value_errors() -> None:
    kernels = library.kernels()
    if kernels is None:
        pytest.skip(library.available()[1])
    pool = torch.zeros(2, 1, 2, 1, 16, 16)
    q = torch.zeros(1, 1, 16)

    def attend(table: list[int], starts: list[int], context: int) -> None:
        kernels.paged_attention(
            q,
            pool,
            0,
            torch.tensor([table], dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            1.0,
        )

    attend([1, 0], [0, 1], 32)
    for table, starts, context, message in (
        ([1, 2], [0, 1], 32, "block_tables"),
        ([1, -1], [0, 1], 17, "block_tables"),
        ([1, 0], [0, 1], 33, "block_tables"),
        ([1, 0], [0, 2], 32, "query_starts"),
        ([1, 0], [0, 1], 0, "query_starts"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(table, starts, context)
    for slot in (-1, 32):
        with pytest.raises(ValueError, match="slot_mapping"):
            kernels.write_kv(q, q, pool, 0, torch.tensor([slot]))
    for position in (-1, 4):
        with pytest.raises(ValueError, match="positions"):
            kernels.rope(q, q.clone(), torch.tensor([position]), torch.zeros(4, 16))
