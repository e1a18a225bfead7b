"""What `isthmus admin` says of traffic rules."""

from __future__ import annotations

from services.cli.admin import unserved


def test_models_of_rules_that_nobody_serves_are_named_once() -> None:
    table = {
        "aliases": {
            "chat": [{"model": "small"}, {"model": "digest:5d1f0c9a"}],
            "next": [{"model": "smoll"}, {"model": "digest:00000000"}],
        },
        "mirrors": {"small": {"to": "smoll"}},
    }
    served = {"small": "caf6c4bcf7b4", "large": "5d1f0c9ab2e4"}
    assert unserved(table, served) == ["smoll", "digest:00000000"]
