"""The bill of materials of this very environment."""

from __future__ import annotations

from importlib.metadata import distributions, version
from typing import Any

import pytest

from tools.sbom import bill


def test_it_lists_what_is_installed_each_once_and_the_same_every_time() -> None:
    found: Any = bill(distributions())
    refs = [each["bom-ref"] for each in found["components"]]
    assert len(set(refs)) == len(refs)
    assert f"pkg:pypi/grpcio@{version('grpcio')}" in refs
    assert found["metadata"]["component"]["name"] == "isthmus"
    assert found == bill(distributions())
    licensed = [each for each in found["components"] if each.get("licenses")]
    assert 2 * len(licensed) > len(found["components"])


def test_dependencies_name_what_it_lists() -> None:
    found: Any = bill(distributions())
    own = found["metadata"]["component"]["bom-ref"]
    refs = {own, *(each["bom-ref"] for each in found["components"])}
    needs = {each["ref"]: each["dependsOn"] for each in found["dependencies"]}
    assert needs.keys() == refs
    assert all(set(each) <= refs for each in needs.values())
    assert f"pkg:pypi/redis@{version('redis')}" in needs[own]


def test_an_environment_without_us_has_no_bill() -> None:
    with pytest.raises(LookupError, match="isthmus"):
        bill([])
