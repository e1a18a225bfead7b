from __future__ import annotations

from pathlib import Path

import pytest

from services.common.bounded_file import read_bounded, read_secret
from services.common.errors import ConfigError


def test_a_file_of_just_the_bound_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8)
    assert read_bounded("a.b", path, 8) == b"x" * 8
    with pytest.raises(ConfigError, match=r"^a\.b: .*file is larger than 7 bytes$"):
        read_bounded("a.b", path, 7)


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_no_file_is_named_with_its_setting(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^a\.b: .* cannot be read \("):
        read_bounded("a.b", tmp_path / name, 8)


@pytest.mark.parametrize("content", [b"", b" \n", b"abc\n", b"x" * 9, b"x" * 1000])
def test_secrets_have_a_length(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"must hold 4 to 8 bytes$"):
        read_secret("a.b", path, 4, 8)


def test_blanks_around_a_secret_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b" abcdef\n")
    secret = read_secret("a.b", path, 4, 8)
    assert secret.reveal() == b"abcdef"
    assert "abcdef" not in repr(secret)
