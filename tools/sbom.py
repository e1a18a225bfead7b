"""Write what an environment is made of as a CycloneDX 1.6 bill of materials (`make sbom`).

    python tools/sbom.py > dist/sbom.json

It lists what is installed where it runs: run it inside an image for the bill of that image. The
same environment gives the same bytes: there is no time and no random number in it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

ROOT = "isthmus"
_MAX_LICENSE_CHARS = 120  # longer ones are whole texts in the wrong field


def bill(installed: Iterable[Distribution]) -> dict[str, object]:
    """Return the bill of these distributions; ours is what it is the bill of."""
    by_name = {_normal(dist.metadata["Name"]): dist for dist in installed}
    if ROOT not in by_name:
        raise LookupError(f"{ROOT} is not installed here")
    others = [by_name[name] for name in sorted(by_name) if name != ROOT]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(by_name[ROOT], "application")},
        "components": [_component(each, "library") for each in others],
        "dependencies": [
            {"ref": _purl(by_name[name]), "dependsOn": _needs(by_name[name], by_name)}
            for name in sorted(by_name)
        ],
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _purl(dist: Distribution) -> str:
    return f"pkg:pypi/{_normal(dist.metadata['Name'])}@{dist.version}"


def _component(dist: Distribution, kind: str) -> dict[str, object]:
    purl = _purl(dist)
    found: dict[str, object] = {
        "type": kind, "bom-ref": purl, "name": dist.metadata["Name"], "version": dist.version,
        "purl": purl,
    }  # fmt: skip
    told = dist.metadata.json
    expression, name = told.get("license_expression"), told.get("license")
    if expression:
        found["licenses"] = [{"expression": expression}]
    elif isinstance(name, str) and len(name) <= _MAX_LICENSE_CHARS and "\n" not in name:
        found["licenses"] = [{"license": {"name": name}}]
    return found


def _needs(dist: Distribution, by_name: dict[str, Distribution]) -> list[str]:
    """What it depends on, of what is here; extras nobody installed are not."""
    names = {
        _normal(re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0]) for need in dist.requires or ()
    }
    return sorted(_purl(by_name[name]) for name in names & by_name.keys())


def main() -> int:
    """Write the bill of this environment."""
    sys.stdout.write(json.dumps(bill(distributions()), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
