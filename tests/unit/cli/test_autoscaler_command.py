"""What `isthmus autoscaler` is told of Kubernetes, before anything starts."""

from __future__ import annotations

import pytest

from services.autoscaler.deployment_driver import DeploymentDriver
from services.autoscaler.epoch_clock import EpochClock
from services.autoscaler.policy_file import EXAMPLE, load_policy
from services.autoscaler.worker_calls import WorkerCalls
from services.cli import exits
from services.cli.autoscaler_command import _deployment_driver
from services.cli.main import run
from services.common.clock import ManualClock
from services.common.errors import ConfigError

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


def test_every_pool_of_the_policy_has_its_deployment() -> None:
    policy, clock = load_policy(EXAMPLE), EpochClock(ManualClock())
    make = _deployment_driver(["prefill=p"], URL, SPACE, 7000)
    with pytest.raises(ConfigError, match="each pool of the policy: decode, prefill"):
        make(policy, WorkerCalls(), clock)
    make = _deployment_driver(["prefill=p", "decode=d"], URL, SPACE, 7000)
    driver = make(policy, WorkerCalls(), clock)
    assert isinstance(driver, DeploymentDriver)
    assert driver.capabilities.names_victims


def test_kuberay_needs_a_ray_to_join(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autoscaler", "--policy", str(EXAMPLE), "--driver", "kuberay"]) == exits.USAGE
    assert "needs ray.address and ray.namespace" in capsys.readouterr().err
