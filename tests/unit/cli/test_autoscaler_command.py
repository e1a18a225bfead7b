"""What `isthmus autoscaler` is told of Kubernetes, before anything starts."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from services.autoscaler.deployment_driver import DeploymentDriver
from services.autoscaler.driver import Driver
from services.autoscaler.epoch_clock import EpochClock
from services.autoscaler.kube_api import KubeApi
from services.autoscaler.kuberay_driver import KubeRayDirect
from services.autoscaler.main import Options, read_again, read_followed
from services.autoscaler.policy_file import EXAMPLE, load_policy
from services.autoscaler.worker_calls import WorkerCalls
from services.cli import autoscaler_command, exits
from services.cli.autoscaler_command import (
    _deployment_driver,
    _kuberay_direct_driver,
    read_profile,
)
from services.cli.main import run
from services.common.clock import ManualClock
from services.common.config import IsthmusConfig
from services.common.errors import ConfigError
from tests.support.memory_driver import MemoryDriver
from tests.support.scaling_policy import make_policy, policy_values

URL, SPACE = "http://127.0.0.1:8001", "serving"
ASKED = ("autoscaler", "--policy", str(EXAMPLE), "--driver", "deployment")


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--deployment", "prefill"), "POOL=NAME"),
        (("--deployment", "prefill=a", "--deployment", "prefill=b"), "once for each pool"),
        (("--kubernetes", URL), "--kubernetes needs --namespace"),
        ((), "not in a pod"),
    ],
)
def test_what_is_missing_is_told_before_anything_starts(
    flags: tuple[str, ...],
    fault: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert run([*ASKED, *flags]) == exits.USAGE
    assert fault in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ((), "needs --ray-cluster"),
        (("--ray-cluster", "llama", "--group", "prefill"), "--group is POOL=NAME"),
        (("--ray-cluster", "llama", "--group", "prefill=p"), "needs ray.address"),
    ],
)
def test_what_kuberay_direct_lacks_is_told_before_anything_starts(
    flags: tuple[str, ...], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--kubernetes", URL, "--namespace", SPACE)
    asked = ("autoscaler", "--policy", str(EXAMPLE), "--driver", "kuberay-direct")
    assert run([*asked, *place, *flags]) == exits.USAGE
    assert fault in " ".join(capsys.readouterr().err.split())


def test_every_pool_of_the_policy_has_its_worker_group(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, clock = load_policy(EXAMPLE), EpochClock(ManualClock())
    actors = MemoryDriver(ManualClock())
    monkeypatch.setattr(autoscaler_command, "_ray_driver", lambda _: lambda *_: actors)
    monkeypatch.setattr(actors, "host_of", None, raising=False)
    config, api = IsthmusConfig(), KubeApi(URL, SPACE)
    make = _kuberay_direct_driver(config, api, "llama", ["prefill=p"])
    with pytest.raises(ConfigError, match="--group is needed for each pool of the policy: decode"):
        make(policy, WorkerCalls(), clock)
    make = _kuberay_direct_driver(config, api, "llama", ["prefill=p", "decode=d"])
    assert isinstance(make(policy, WorkerCalls(), clock), KubeRayDirect)


def test_every_pool_of_the_policy_has_its_deployment() -> None:
    policy, clock = load_policy(EXAMPLE), EpochClock(ManualClock())
    make = _deployment_driver(["prefill=p"], URL, SPACE, 7000)
    with pytest.raises(ConfigError, match="each pool of the policy: decode, prefill"):
        make(policy, WorkerCalls(), clock)
    make = _deployment_driver(["prefill=p", "decode=d"], URL, SPACE, 7000)
    driver = make(policy, WorkerCalls(), clock)
    assert isinstance(driver, DeploymentDriver)
    assert driver.capabilities.names_victims


def test_profile_is_read_beside_the_policy_or_comes_with_isthmus(tmp_path: Path) -> None:
    shipped = read_profile("quick_start", tmp_path)
    assert shipped.prefill_tokens_s(1000) > 0
    models = files("services.sim") / "models"
    own = (models / "long_prompts.json").read_text(encoding="utf-8")
    (tmp_path / "quick_start.json").write_text(own, encoding="utf-8")
    assert read_profile("quick_start", tmp_path) == read_profile("long_prompts", tmp_path)
    assert read_profile("quick_start", tmp_path) != shipped


@pytest.mark.parametrize(
    ("name", "fault"),
    [("h100", "h100.json; `isthmus profile --out h100.json`"), ("../h100", "no plain name")],
)
def test_profile_that_is_not_there_is_refused(name: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=fault):
        read_profile(name, tmp_path)


def test_damaged_profile_is_refused_at_its_place(tmp_path: Path) -> None:
    (tmp_path / "h100.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"h100\.json: format: Field required"):
        read_profile("h100", tmp_path)


@pytest.mark.parametrize(("mode", "is_read"), [("Forecast", True), ("Off", False)])
def test_profile_that_a_policy_names_is_read_where_it_is_forecast(
    mode: str, is_read: bool, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.json"
    named = {"source": "Profile", "profileRef": {"name": "quick_start"}}
    values = policy_values(predictive={"mode": mode, "capacityModel": named})
    policy.write_text(json.dumps(values), encoding="utf-8")
    options = Options(
        policy, make_driver=_no_driver, read_profile=lambda name: read_profile(name, tmp_path)
    )
    expected = read_profile("quick_start", tmp_path) if is_read else None
    assert read_followed(options).profile == expected


_OTHER = {
    "type": "External",
    "target": {"type": "Value", "value": 1},
    "external": {"metric": {"name": "waiting"}},
}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"name": "answers"}, "another name or role"),
        ({"metrics": [_OTHER]}, "not asked for at the start .* waiting"),
    ],
)
def test_an_edit_is_followed_as_far_as_what_was_made_for_the_first_goes(
    changes: dict[str, object], fault: str, tmp_path: Path
) -> None:
    path, known = tmp_path / "policy.json", make_policy()
    options = Options(path, _no_driver, lambda name: read_profile(name, tmp_path))
    path.write_text(json.dumps(policy_values({"decode": {"maxReplicas": 7}})), encoding="utf-8")
    assert read_again(options, known).policy.spec.pools[1].max_replicas == 7

    path.write_text(json.dumps(policy_values({"decode": changes})), encoding="utf-8")
    assert read_followed(options).policy != known
    with pytest.raises(ConfigError, match=fault):
        read_again(options, known)


def _no_driver(*_: object) -> Driver:
    raise AssertionError("no driver is needed to read a policy")


def test_kuberay_needs_a_ray_to_join(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autoscaler", "--policy", str(EXAMPLE), "--driver", "kuberay"]) == exits.USAGE
    assert "needs ray.address and ray.namespace" in capsys.readouterr().err
