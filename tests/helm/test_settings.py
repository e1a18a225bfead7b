"""What the chart writes for our own processes is what they take: settings, flags, the policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.testing
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from services.autoscaler.policy_file import load_policy
from services.cli.main import app
from services.common.config import IsthmusConfig, load_config
from services.operator.cluster import parse_spec
from services.operator.configuration import configuration, configuration_faults
from tests.helm.rendering import RELEASE, SETS, Manifest, Pod, Rendered, refusal, render, render_set

POOLS = ("prefill", "decode")
SERVING = ("router", *POOLS, "autoscaler", "ray", "operator")
# What a pod sees of fields and Secrets.
_FIELDS = {"status.podIP": "10.1.2.3", "metadata.name": "pod-7"}
every_set = pytest.mark.parametrize("name", sorted(SETS))


def environment(container: Manifest) -> dict[str, str]:
    """The variables of a container as its process sees them."""
    seen: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            value = each["value"]
            for known, text in seen.items():  # only what is declared before is expanded
                value = value.replace(f"$({known})", text)
        elif "fieldRef" in each["valueFrom"]:
            value = _FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = "rediss://user:secret@store:6380/0"
        assert "$(" not in value, f"{each['name']} names a variable that comes later"
        seen[each["name"]] = value
    return seen


def loaded(rendered: Rendered, pod: Pod, container: Manifest, folder: Path) -> IsthmusConfig:
    """Read the settings of a container as its process does; raises ConfigError."""
    (mount,) = (v for v in pod.spec["volumes"] if v["name"] == "config")
    text = rendered.one("ConfigMap", mount["configMap"]["name"])["data"]["isthmus.yaml"]
    path = folder / "isthmus.yaml"
    path.write_text(text)
    return load_config(path, environment(container), {})


def processes(rendered: Rendered) -> list[tuple[Pod, Manifest]]:
    """Every container that is one of our processes."""
    return [
        (pod, container)
        for pod in rendered.pods
        for container in pod.spec["containers"]
        if pod.component in SERVING
    ]


@every_set
def test_every_process_takes_its_settings(name: str, tmp_path: Path) -> None:
    rendered = render_set(name)
    assert processes(rendered)
    for pod, container in processes(rendered):
        config = loaded(rendered, pod, container, tmp_path)
        is_told = "ISTHMUS_STORE__URL" in environment(container)
        assert is_told == (pod.component != "operator")  # which has no business with the store
        if pod.component in POOLS:
            assert config.worker.worker_id == "pod-7"
            assert config.worker.bind_host == "10.1.2.3"
            assert config.worker.role == pod.component
        if pod.component == "router":
            assert config.router.router_id == "pod-7"


@every_set
def test_files_that_settings_name_are_mounted(name: str, tmp_path: Path) -> None:
    rendered = render_set(name)
    for pod, container in processes(rendered):
        config = loaded(rendered, pod, container, tmp_path)
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        for section in config.model_dump().values():
            for key, value in section.items():
                is_path = key.endswith(("_file", "_dir")) and isinstance(value, str) and value
                # Files of KV and metrics belong to workers: the head of Ray runs none.
                if is_path and not (
                    container["name"] in ("ray-head", "autoscaler") and _workers(key)
                ):
                    assert any(Path(value).is_relative_to(each) for each in mounts), (key, value)


def _workers(key: str) -> bool:
    return key in ("curve_key_file", "metrics_token_file")


@every_set
def test_arguments_are_those_of_the_command(name: str) -> None:
    runner = typer.testing.CliRunner()
    for pod, container in processes(render_set(name)):
        if "command" not in container:
            continue  # KubeRay writes `ray start`
        program, *words = container["command"]
        assert program == "isthmus", pod.component
        told = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "400"}).output
        flags = {each.split("=")[0] for each in container["args"] if each.startswith("--")}
        assert flags
        assert all(flag in told for flag in flags), flags


@every_set
def test_probes_services_and_policies_name_ports_that_are_bound(name: str, tmp_path: Path) -> None:
    rendered = render_set(name)
    for pod, container in processes(rendered):
        config = loaded(rendered, pod, container, tmp_path)
        ports = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
        if pod.component in POOLS:
            bound = (config.worker.grpc_port, config.transfer.zmq_port, config.worker.metrics_port)
            assert (ports["grpc"], ports["transfer"], ports["metrics"]) == bound
        if pod.component == "router":
            bound = (config.router.grpc_port, config.router.http_port, config.router.metrics_port)
            assert (ports["grpc"], ports["http"], ports["metrics"]) == bound
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for action in (container.get(probe) or {}).values():
                if isinstance(action, dict):
                    assert action["port"] in ports or action["port"] in ports.values()


def test_cluster_of_the_operator_is_one_it_takes_and_of_the_same_settings() -> None:
    by_hand, rendered = render_set("cpu"), render_set("operator")
    (cluster,) = rendered.all("IsthmusCluster")
    spec = parse_spec(cluster["spec"])
    assert not list(configuration_faults(spec))
    for component in ("router", *POOLS):
        text = by_hand.of("ConfigMap", component)["data"]["isthmus.yaml"]
        assert configuration(spec, component) == yaml.safe_load(text), component
    assert not {pod.component for pod in rendered.pods} & {"router", *POOLS}


@pytest.mark.parametrize("profiles", [("production",), ("production", "h100")])
def test_other_profiles_make_clusters_the_operator_takes(profiles: tuple[str, ...]) -> None:
    plain: Manifest = {
        "podDefaults": {"topologySpreadConstraints": []},
        "router": {"processes": 1},
        "operator": {"enabled": True},
        "cluster": {"create": True},
    }
    rendered = render(profiles, plain)
    (cluster,) = rendered.all("IsthmusCluster")
    spec = parse_spec(cluster["spec"])
    assert not list(configuration_faults(spec))
    account = rendered.one("ServiceAccount", spec.autoscaler.service_account_name)
    (subject,) = rendered.of("RoleBinding", "autoscaler")["subjects"]
    assert subject["name"] == account["metadata"]["name"]
    (policy,) = rendered.all("PoolAutoscalingPolicy")
    assert policy["spec"]["clusterRef"] == {"name": cluster["metadata"]["name"]}


def test_what_a_cluster_has_no_place_for_is_refused() -> None:
    cases: tuple[Manifest, ...] = (
        {"router": {"sidecars": [{"name": "s"}]}},
        {"pools": {"decode": {"extraVolumes": [{"name": "v"}]}}},
        {"pools": {"prefill": {"dra": {"enabled": True}}}},
        {"transfer": {"rdma": {"enabled": True}}},
        {"router": {"processes": 2}},
        {"redis": {"bundled": {"existingSecret": "s"}}},
    )
    for values in cases:
        assert "cluster.create:" in refusal(values, ("cpu", "operator"))


def test_autoscaler_drives_the_deployments_there_are() -> None:
    rendered = render_set("production")
    args = rendered.pod("autoscaler").main["args"]
    named = dict(a.removeprefix("--deployment=").split("=") for a in args if "--deployment=" in a)
    assert named == {pool: f"{RELEASE}-isthmus-{pool}" for pool in POOLS}
    for deployment in named.values():
        assert rendered.one("Deployment", deployment)
    worker = rendered.pod("decode").main
    (grpc,) = (each["containerPort"] for each in worker["ports"] if each["name"] == "grpc")
    assert f"--worker-port={grpc}" in args


@pytest.mark.parametrize("name", ["production", "ray"])
def test_policies_are_taken_and_fit_the_pods(name: str, tmp_path: Path) -> None:
    rendered = render_set(name)
    path = tmp_path / "policy.yaml"
    path.write_text(rendered.of("ConfigMap", "autoscaler")["data"]["policy.yaml"])
    policy = load_policy(path)
    assert {pool.name for pool in policy.spec.pools} == set(POOLS)
    for pool in policy.spec.pools:
        if name == "production":
            config = loaded(
                rendered, rendered.pod(pool.name), rendered.pod(pool.name).main, tmp_path
            )
            assert pool.drain.deadline_seconds <= config.worker.drain_s


def test_settings_of_values_win_over_those_of_the_chart(tmp_path: Path) -> None:
    values = {
        "config": {"lease": {"heartbeat_ms": 250}, "telemetry": {"log_level": "debug"}},
        "pools": {"decode": {"config": {"worker": {"max_num_seqs": 7}}}},
    }
    rendered = render(values=values)
    decode = loaded(rendered, rendered.pod("decode"), rendered.pod("decode").main, tmp_path)
    prefill = loaded(rendered, rendered.pod("prefill"), rendered.pod("prefill").main, tmp_path)
    assert (decode.worker.max_num_seqs, prefill.worker.max_num_seqs) == (7, 64)
    assert (decode.lease.heartbeat_ms, decode.telemetry.log_level) == (250, "debug")


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 0), ("8Gi", 8 << 30), ("512Mi", 512 << 20), ("1500M", 1_500_000_000), ("9", 9)],
)
def test_sizes_are_bytes(text: str, size: int, tmp_path: Path) -> None:
    rendered = render(values={"pools": {"decode": {"kvMemory": text}}})
    pod = rendered.pod("decode")
    assert loaded(rendered, pod, pod.main, tmp_path).worker.kv_memory_bytes == size


OPEN_DOORS = (
    ({"auth": {"allowUnauthenticated": True, "existingSecret": ""}}, None),
    ({"auth": {"existingSecret": ""}}, "auth.existingSecret"),
    ({"auth": {"metricsTokenSecret": ""}}, "auth.metricsTokenSecret"),
    ({"tls": {"mode": "none"}}, "auth.allowPlaintext"),
    ({"transfer": {"existingSecret": ""}}, "transfer.existingSecret"),
    ({"redis": {"external": {"enabled": False}}}, "exactly one"),
    ({"auth": {"jwt": {"existingConfigMap": "keys"}}}, "issuer and audience"),
)


@pytest.mark.parametrize(("values", "said"), OPEN_DOORS)
def test_what_is_open_is_so_in_so_many_words(values: Manifest, said: str | None) -> None:
    if said is None:
        assert render((), values).pods
    else:
        assert said in refusal(values, ())


WAITS = st.integers(0, 100)


@st.composite
def times(draw: st.DrawFn) -> tuple[int, int, int | None]:
    before, drain = draw(WAITS), draw(WAITS)
    grace = draw(st.none() | st.integers(before + drain - 10, before + drain + 30))
    return before, drain, None if grace is None else max(6, grace)


@examples(max_examples=20, derandomize=True)
@given(times(), st.sampled_from(("router", "prefill", "decode")))
def test_grace_is_longer_than_what_it_is_for_or_refused(
    drawn: tuple[int, int, int | None], component: str
) -> None:
    """RB-110: no values give a pod less time than its wait, its drain and 5 seconds."""
    before, drain, grace = drawn
    own = {"preStopSeconds": before, "drainSeconds": drain, "terminationGracePeriodSeconds": grace}
    values: Manifest = {component: own} if component == "router" else {"pools": {component: own}}
    if grace is not None and grace <= before + drain + 5:
        assert "would be killed while it drains" in refusal(values)
        return
    rendered = render(values=values)
    pod = rendered.pod(component)
    assert pod.spec["terminationGracePeriodSeconds"] > before + drain + 5
    assert ("lifecycle" in pod.main) == (before > 0)
    section = yaml.safe_load(rendered.of("ConfigMap", component)["data"]["isthmus.yaml"])
    assert section["router" if component == "router" else "worker"]["drain_s"] == drain
