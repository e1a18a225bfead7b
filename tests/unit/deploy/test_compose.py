"""deploy/compose.yaml, read as what it says: no engine is at hand that could start it."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from services.cli.main import app
from services.common.config import IsthmusConfig, load_config

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: each for name, each in SERVICES.items() if each["image"].startswith("isthmus")}
WITHOUT_CLIENT = {"otel"}  # its image has nothing that could ask


def config_of(name: str) -> IsthmusConfig:
    path = DEPLOY / "compose/isthmus.yaml"
    return load_config(path, OURS[name].get("environment", {}), {})


def test_there_is_one_of_everything_and_two_to_decode() -> None:
    commands = [each["command"] for each in OURS.values()]
    roles = [command[command.index("--role") + 1] for command in commands if "--role" in command]
    assert sorted(roles) == ["decode", "decode", "prefill"]
    assert {"store", "router", "prometheus", "grafana", "otel"} < SERVICES.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_nobody_is_root_or_writes_to_the_root_or_takes_all_there_is(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["cpus"]
    assert service["pids_limit"]
    assert "privileged" not in service
    assert service["logging"]["options"]["max-size"]


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - WITHOUT_CLIENT))
def test_everything_that_can_be_asked_is(name: str) -> None:
    health = SERVICES[name]["healthcheck"]
    assert health["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries"} <= health.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_on_loopback_and_images_have_a_version(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert port.startswith("127.0.0.1:")
    image = SERVICES[name]["image"]
    assert image in ("isthmus", "isthmus-control") or re.search(r":v?\d+\.\d+", image)
    assert "latest" not in image


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_there_and_cannot_be_written(name: str) -> None:
    for mount in SERVICES[name].get("volumes", []):
        source, _, mode = mount.split(":")
        assert (DEPLOY / source).exists(), source
        assert mode == "ro"


@pytest.mark.parametrize("name", OURS)
def test_commands_and_settings_are_those_of_the_program(name: str) -> None:
    command, *flags = OURS[name]["command"]
    known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    options = {opt for parameter in known.params for opt in parameter.opts}
    assert {flag for flag in flags if flag.startswith("--")} <= options
    config_of(name)  # raises for a key that nobody knows, and for a pair that does not go together


@pytest.mark.parametrize("name", [name for name in OURS if name != "router"])
def test_a_worker_binds_the_address_it_is_given(name: str) -> None:
    worker = config_of(name).worker
    (network,) = OURS[name]["networks"].values()
    assert worker.bind_host == network["ipv4_address"]
    (subnet,) = COMPOSE["networks"]["cluster"]["ipam"]["config"]
    assert ipaddress.ip_address(worker.bind_host) in ipaddress.ip_network(subnet["subnet"])
    assert worker.worker_id == name


def test_addresses_differ_and_nobody_reaches_the_world_from_the_cluster() -> None:
    addresses = [config_of(name).worker.bind_host for name in OURS if name != "router"]
    assert len(set(addresses)) == len(addresses)
    assert COMPOSE["networks"]["cluster"]["internal"] is True


def test_everything_that_has_metrics_is_scraped_where_it_listens() -> None:
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    targets = {
        target
        for job in scraped["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    config = config_of("router")
    assert config.router.metrics_port == config.worker.metrics_port
    assert targets == {f"{name}:{config.worker.metrics_port}" for name in OURS}


def test_rules_dashboards_and_traces_meet() -> None:
    mounts = {
        source: target
        for name in ("prometheus", "grafana")
        for source, target, _ in (m.split(":") for m in SERVICES[name]["volumes"])
    }
    rules = mounts["../helm/isthmus/files/prometheus"]
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    assert scraped["rule_files"] == [f"{rules}/*.yml"]
    provider = yaml.safe_load((DEPLOY / "compose/grafana/dashboards/isthmus.yaml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert mounts["../helm/isthmus/files/grafana"] == folder
    collector = yaml.safe_load((DEPLOY / "compose/otel-collector.yaml").read_text())
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert config_of("router").telemetry.otlp_endpoint == f"http://otel:{port}"
    assert collector["service"]["pipelines"]["traces"]["receivers"] == ["otlp"]
