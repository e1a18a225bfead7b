"""What `isthmus up` tells Ray of its workers, and what it makes of where they turn up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.cli import exits
from services.cli.main import run
from services.cli.unit import STARTING, Listening, Unit
from services.cli.up_plan import Counts, FrontDoors, PlannedProcess, fixed_ports, plan_processes
from services.cli.up_ray import RayRuntime, check_node_address, placement, ray_pools, slots
from services.common.config import IsthmusConfig, load_config
from services.common.errors import ConfigError
from services.runtime.ray_actor import Begun
from services.runtime.ray_cluster import Placement

DOORS = FrontDoors("127.0.0.1", 0, "127.0.0.1", 0)


def plans(runtime_dir: Path | None, metrics_port: int | None = None) -> list[PlannedProcess]:
    made = plan_processes(
        Counts(1, 2, 3), DOORS, threads=0, runtime_dir=runtime_dir, tag="-a",
        metrics_port=metrics_port,
    )  # fmt: skip
    return list(made)


def configured(**settings: str) -> IsthmusConfig:
    environ = {f"ISTHMUS_{name.upper()}": value for name, value in settings.items()}
    return load_config(None, environ, {"model.name": "/models/x"})


def test_workers_of_other_machines_are_told_nothing_of_this_one() -> None:
    worker = plans(None, metrics_port=9100)[1]
    assert worker.arguments == ("--role", "prefill", "--worker-id", "prefill-1-a", "--threads", "0")
    assert worker.http_port == 9101
    assert fixed_ports(plans(None, metrics_port=9100)) == ()


def test_a_ray_of_our_own_has_room_for_all_workers() -> None:
    config = configured(ray__decode_resources="decode_slot=0.5,disk=2")
    made = slots(config, plans(Path("/r")), may_grow=False)
    assert made == {"prefill_slot": 2.0, "decode_slot": 1.5, "disk": 6.0}
    made = slots(config, plans(Path("/r")), may_grow=True)
    assert made == {"prefill_slot": 64.0, "decode_slot": 32.0, "disk": 128.0}


def test_each_role_takes_what_is_configured_for_it() -> None:
    config = configured(
        ray__prefill_resources="h100=1", ray__prefill_labels="zone=a", ray__gpus_per_worker="2"
    )
    assert placement(config, "prefill") == Placement({"h100": 1.0}, {"zone": "a"}, 2.0)
    assert placement(config, "decode") == Placement({"decode_slot": 1.0}, {}, 2.0)


def test_pools_of_a_policy_take_what_their_role_takes() -> None:
    pools = ray_pools(configured(), {"readers": "prefill", "writers": "decode"})
    assert {name: pool.role for name, pool in pools.items()} == {
        "readers": "prefill", "writers": "decode",
    }  # fmt: skip
    assert pools["writers"].placement == Placement({"decode_slot": 1.0})
    assert pools["writers"].order.model_path == "/models/x"
    assert pools["writers"].order.arguments == ("worker",)


def test_a_driver_of_actors_needs_to_know_where_they_are() -> None:
    policy = Path(__file__).parents[3] / "services" / "autoscaler" / "example.yaml"
    assert run(["autoscaler", "--policy", str(policy), "--driver", "ray"]) == exits.USAGE


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ray__prefill_resources", "slot"),
        ("ray__decode_resources", "slot=0"),
        ("ray__decode_resources", "slot=-1"),
        ("ray__decode_labels", "zone="),
    ],
)
def test_pairs_that_are_none_are_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=setting.replace("__", ".")):
        configured(**{setting: value})


def test_binding_to_a_nodes_address_is_judged_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="unencrypted"):
        check_node_address(configured(), "192.0.2.7")
    check_node_address(configured(), "127.0.0.1")
    open_to_all = configured(transfer__allow_plaintext_kv="true", auth__allow_plaintext="true")
    check_node_address(open_to_all, "192.0.2.7")


class FakeWorker:
    """The part of RayWorker that a unit sees."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.pid: int | None = None
        self.begun: Begun | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            raise subprocess.TimeoutExpired([], timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self.returncode = -sig


class FakeCluster:
    """Notes what it was asked for."""

    def __init__(self, *, is_own: bool) -> None:
        self.is_own = is_own
        self.namespace = "test"
        self.launched: list[tuple[str, object, Placement]] = []
        self.workers: list[FakeWorker] = []

    def launch(self, name: str, order: object, place: Placement, note: object) -> FakeWorker:
        self.launched.append((name, order, place))
        self.workers.append(FakeWorker())
        return self.workers[-1]


def runtime(*, is_own: bool, asked_for: str) -> tuple[RayRuntime, FakeCluster]:
    cluster = FakeCluster(is_own=is_own)
    made = RayRuntime(cluster, "192.0.2.1:6379", ("m:f", ("worker",)))  # type: ignore[arg-type]
    config = configured()
    config = config.model_copy(
        update={"store": config.store.model_copy(update={"url": SecretStr("redis://:pw@h")})}
    )
    made.use(config, asked_for)
    return made, cluster


@pytest.mark.parametrize(
    ("is_own", "asked_for", "host", "model_path"),
    [
        (True, "smollm2", "127.0.0.1", "/models/x"),  # as it was resolved on this machine
        (False, "smollm2", "", ""),  # every node finds it by its name
        (False, "/shared/llama", "", "/shared/llama"),
    ],
)
def test_the_order_says_where_to_bind_and_where_the_model_is(
    is_own: bool, asked_for: str, host: str, model_path: str, tmp_path: Path
) -> None:
    made, cluster = runtime(is_own=is_own, asked_for=asked_for)
    log = tmp_path / "log"
    launch = made.unit_launch(plans(tmp_path if is_own else None)[0], log)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT)
    launch(["--role", "prefill"], {}, fd)
    os.close(fd)
    ((name, order, place),) = cluster.launched
    assert name.startswith("prefill-")
    assert place == Placement({"prefill_slot": 1.0})
    assert order.host == host  # type: ignore[attr-defined]
    assert order.model_path == model_path  # type: ignore[attr-defined]
    assert order.arguments == ("worker", "--role", "prefill")  # type: ignore[attr-defined]
    assert order.log_path == (str(log) if is_own else "")  # type: ignore[attr-defined]
    assert "redis://:pw@h" in order.config_text  # type: ignore[attr-defined]


def test_a_unit_placed_elsewhere_is_where_it_says_it_is(tmp_path: Path) -> None:
    places: list[Listening | None] = [None, None, Listening("192.0.2.9", 4711, 9100)]
    worker = FakeWorker()

    def launch(_argv: Sequence[str], _environ: Mapping[str, str], _fd: int) -> FakeWorker:
        return worker

    unit = Unit(plans(None)[0], lambda *_: [], {}, tmp_path, launch, where=lambda: places.pop(0))
    unit.spawn()
    for now in (0.0, 0.1):
        unit.tick(now)
        assert (unit.state.state, unit.grpc, unit.metrics) == (STARTING, "", "")
    unit.tick(0.2)
    assert (unit.grpc, unit.metrics, places) == ("192.0.2.9:4711", "192.0.2.9:9100", [])
    unit.tick(0.3)  # known now: not asked for again
    unit.child.send(signal.SIGKILL)
    unit.tick(0.4)
    assert unit.state.reason == "killed by SIGKILL"
    unit.close_probe()
