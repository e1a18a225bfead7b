from __future__ import annotations

import pytest

from services.cli.store_address import HIDDEN, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379", "redis://127.0.0.1:6379"),
        ("redis://user:pw-4711@store.internal:6379/0", f"redis://{HIDDEN}@store.internal:6379/0"),
        ("rediss://:pw-4711@[::1]:6379/2", f"rediss://{HIDDEN}@[::1]:6379/2"),
        ("redis://h:1/0?password=pw-4711", f"redis://h:1/0?{HIDDEN}"),
        ("unix:///run/store.sock", "unix:///run/store.sock"),
        ("redis://:12/pw-4711@h:6379/0", HIDDEN),
        ("redis://:12#pw-4711@h:6379/0", HIDDEN),
        ("redis://:pw/4711@h:6379/0", HIDDEN),
        ("redis://:pw-4711@h:port", HIDDEN),
        ("pw-4711", HIDDEN),
    ],
)
def test_only_the_place_of_a_store_is_shown(url: str, shown: str) -> None:
    """RB-119: no form of a password is shown, not even of an address that is written wrongly."""
    assert shown_url(url) == shown
    assert "4711" not in shown_url(url)
