"""Manifests of the chart as the real helm renders them, kept for as long as the tests run."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.kube_tools import kube_tools

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "helm" / "isthmus"
PROFILES = CHART / "profiles"
RELEASE, SPACE = "rel", "space"
_TIMEOUT_S = 60

# Any: manifests and values are nested mappings of whatever.
Manifest = dict[str, Any]

# Every way of giving profiles that documentation tells of, in the order of -f.
SETS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "cpu": ("cpu",),
    "production": ("production",),
    "h100": ("production", "h100"),
    "h200": ("production", "h200"),
    "rdma": ("production", "h100", "rdma"),
    "ray": ("cpu", "ray"),
    "operator": ("cpu", "operator"),
}
MONITORING, GATEWAY = "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"


def _documents(text: str) -> Iterator[Manifest]:
    """Yield each document; PyYAML's quick way through several has no safe form of its own."""
    loader: Any = yaml.CSafeLoader(text)  # its methods have no types
    try:
        while loader.check_data():
            yield loader.get_data()
    finally:
        loader.dispose()


class Refused(Exception):
    """Helm renders nothing; the text is what it says."""


@dataclass(frozen=True)
class Pod:
    """A pod, or the template of one, and the manifest it stands in."""

    owner: Manifest
    meta: Manifest
    spec: Manifest

    @property
    def component(self) -> str:
        """Its label."""
        return str(self.meta["labels"]["app.kubernetes.io/component"])

    @property
    def containers(self) -> list[Manifest]:
        """All of them."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def main(self) -> Manifest:
        """The one the pod is for."""
        return dict(self.spec["containers"][0])


class Rendered:
    """What one call of helm gave."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.manifests: list[Manifest] = [each for each in _documents(text) if each]

    def all(self, kind: str) -> list[Manifest]:
        """Manifests of a kind."""
        return [each for each in self.manifests if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        """The one of that name."""
        (found,) = (each for each in self.all(kind) if each["metadata"]["name"] == name)
        return found

    def of(self, kind: str, component: str) -> Manifest:
        """The one of a component that has the component's name."""
        return self.one(kind, f"{RELEASE}-isthmus-{component}")

    @property
    def pods(self) -> list[Pod]:
        """Every pod there is to be."""
        return [pod for each in self.manifests for pod in _pods(each)]

    def pod(self, component: str) -> Pod:
        """The one of a component."""
        (found,) = (pod for pod in self.pods if pod.component == component)
        return found


def _pods(manifest: Manifest) -> Iterator[Pod]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Pod":
        yield Pod(manifest, manifest["metadata"], spec)
    elif manifest["kind"] == "RayCluster":
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            yield Pod(manifest, group["template"]["metadata"], group["template"]["spec"])
    elif manifest["kind"] == "LeaderWorkerSet":
        template = spec["leaderWorkerTemplate"]["workerTemplate"]
        yield Pod(manifest, template["metadata"], template["spec"])
    elif "template" in spec:
        yield Pod(manifest, spec["template"]["metadata"], spec["template"]["spec"])


def render(
    profiles: Sequence[str] = ("cpu",),
    values: Mapping[str, Any] | None = None,
    *,
    apis: Sequence[str] = (MONITORING, GATEWAY),
    release: str = RELEASE,
) -> Rendered:
    """Render the chart; raises Refused."""
    return _render(tuple(profiles), json.dumps(values or {}), tuple(apis), release)


def render_set(name: str) -> Rendered:
    """Render one of SETS."""
    return render(SETS[name])


def refusal(values: Mapping[str, Any], profiles: Sequence[str] = ("cpu",)) -> str:
    """What is said to values that are not taken."""
    try:
        render(profiles, values)
    except Refused as refused:
        return str(refused)
    raise AssertionError(f"helm takes {values}")


@functools.lru_cache(maxsize=512)
def _render(
    profiles: tuple[str, ...], values: str, apis: tuple[str, ...], release: str
) -> Rendered:
    command = ["template", release, str(CHART), "--namespace", SPACE, "--values", "-"]
    for api in apis:
        command += ["--api-versions", api]
    return Rendered(helm(*command, profiles=profiles, given=values))


def helm(*command: str, profiles: Sequence[str] = (), given: str = "") -> str:
    """Call it; raises Refused with what it says. `--values -` comes last, and so wins."""
    files = [
        part for name in profiles for part in ("--values", str(PROFILES / f"values-{name}.yaml"))
    ]
    at = command.index("--values") if "--values" in command else len(command)
    with tempfile.TemporaryDirectory(prefix="isthmus-helm-") as home:
        done = subprocess.run(
            [str(kube_tools().helm), *command[:at], *files, *command[at:]],
            input=given,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={"HOME": home, "PATH": "/usr/bin:/bin"},
        )
    if done.returncode:
        raise Refused(re.sub(r"\s+", " ", done.stderr + done.stdout))
    return done.stdout
