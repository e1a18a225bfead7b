from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from services.common.errors import ModelFileError
from services.models.cache import DigestCache, build_directory, default_cache_dir, file_lock
from services.models.resolved import file_digest


def test_a_lock_that_is_held_too_long_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with (
        file_lock(tmp_path / "l", timeout_s=1),
        pytest.raises(ModelFileError, match="another process"),
        file_lock(tmp_path / "l", timeout_s=0.1),
    ):
        pytest.fail("two holders")


def test_a_lock_is_passed_on_and_not_left_behind_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), file_lock(tmp_path / "l"):
        raise KeyError
    order: list[str] = []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with file_lock(tmp_path / "l", timeout_s=10):
            order.append("second")

    thread = threading.Thread(target=second)
    with file_lock(tmp_path / "l"):
        thread.start()
        entered.wait(5)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def _hold_and_die(lock: str) -> None:
    with file_lock(Path(lock)):
        os._exit(9)


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_hold_and_die, args=(str(tmp_path / "l"),)
    )
    process.start()
    process.join(30)
    assert process.exitcode == 9
    with file_lock(tmp_path / "l", timeout_s=0.1):
        pass


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fill(partial: Path) -> None:
        (partial / "half").write_text("x")
        raise ModelFileError("no")

    with pytest.raises(ModelFileError):
        build_directory(tmp_path / "models" / "m", fill)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_build_replaces_the_target_and_what_a_killed_one_left(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / ".partial-m-dead").mkdir(parents=True)
    (models / ".partial-other-alive").mkdir()
    (models / "m").mkdir()
    (models / "m" / "old").write_text("x")
    build_directory(models / "m", lambda partial: (partial / "new").touch())
    assert sorted(path.name for path in models.iterdir()) == [".partial-other-alive", "m"]
    assert [path.name for path in (models / "m").iterdir()] == ["new"]


def test_digests_are_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(path: Path) -> str:
        calls.append(path.name)
        return file_digest(path)

    monkeypatch.setattr("services.models.cache.file_digest", counted)
    file = tmp_path / "weights"
    file.write_text("one")
    first = DigestCache(tmp_path / "d.json").digest(file)
    assert DigestCache(tmp_path / "d.json").digest(file) == first == file_digest(file)
    assert calls == ["weights"]
    file.write_text("two")
    os.utime(file, ns=(1, 1))  # size is the same; the time tells
    assert DigestCache(tmp_path / "d.json").digest(file) == file_digest(file) != first


@pytest.mark.parametrize("text", ["", "[]", '{"x": 5}', '{"x": "zz"}'])
def test_a_damaged_digest_file_means_hashing_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    (tmp_path / "file").write_text("x")
    assert DigestCache(tmp_path / "d.json").digest(tmp_path / "file") == file_digest(
        tmp_path / "file"
    )


def test_the_digest_file_stays_small(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "d.json")
    for i in range(300):
        (tmp_path / "file").write_text("x" * i)
        cache.digest(tmp_path / "file")
    assert (tmp_path / "d.json").stat().st_size < 256 * 400


def test_the_place_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("ISTHMUS_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "isthmus"
