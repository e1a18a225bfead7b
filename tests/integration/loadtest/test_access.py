"""Targets behind TLS and API keys: one key for all, and keys of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.credentials import KEY_VARIABLE, ApiKeys, read_keys
from loadtest.grpc_target import GrpcTarget
from loadtest.http_target import HttpTarget
from loadtest.records import Piece, PlannedRequest, Prompt, RequestRecord, Status
from loadtest.runner import RunClock
from loadtest.scenario import parse_scenario
from loadtest.target import LiveTarget, TargetUnusable
from services.common.errors import ConfigError
from services.gateway.auth import AuthConfig
from services.gateway.config import GatewayConfig
from services.gateway.keys import create_key
from services.text.tokenizer import TextModel
from tests.support.certs import identity, make_certs
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


def locked(directory: Path) -> GatewayConfig:
    make_certs(directory)
    return GatewayConfig(
        auth=AuthConfig(directory / "keys.json", poll_s=0.0),
        tls=identity(directory, "doors", ca=False),
        health_poll_s=0.02,
    )


def targets_of(doors: Doors, keys: ApiKeys, ca_file: Path | None) -> list[LiveTarget]:
    clock = RunClock()
    clock.start()
    return [
        GrpcTarget(f"localhost:{doors.grpc_port}", clock, keys, is_tls=True, ca_file=ca_file),
        HttpTarget(f"https://localhost:{doors.http_port}", clock, keys, ca_file=ca_file),
    ]


async def test_each_tenant_is_let_in_by_its_own_key(text_model: TextModel, tmp_path: Path) -> None:
    config = locked(tmp_path)
    default, _ = create_key(tmp_path / "keys.json", "everyone", "", 0)
    of_acme, _ = create_key(tmp_path / "keys.json", "acme", "", 0)
    keys = ApiKeys(default, {"acme": of_acme})
    assert of_acme not in repr(keys)
    async with open_doors(text_model, config) as doors:
        for target in targets_of(doors, keys, tmp_path / "ca.pem"):
            try:
                await target.open()
                for number, tenant in enumerate(("", "acme")):
                    prompt = Prompt((Piece(number, 20),))
                    request = PlannedRequest(number, prompt, max_tokens=8, tenant=tenant)
                    record = RequestRecord(number, 0.0)
                    await target.send(request, record, 20.0)
                    assert (record.status, record.code) == (Status.OK, "")
            finally:
                await target.close()

        def tenants() -> list[str]:
            return sorted(r.tenant for r in doors.hooks.records if r.end is not None)

        await wait_until(lambda: len(tenants()) == 4)
        assert tenants() == ["acme", "acme", "everyone", "everyone"]


async def test_a_missing_key_and_an_unknown_authority_are_told_before_the_load(
    text_model: TextModel, tmp_path: Path
) -> None:
    config = locked(tmp_path)
    create_key(tmp_path / "keys.json", "acme", "", 0)
    async with open_doors(text_model, config) as doors:
        for target in targets_of(doors, ApiKeys(), tmp_path / "ca.pem"):
            with pytest.raises(TargetUnusable, match=r"(?i)unauthenticated.*; set ISTHMUS_API_KEY"):
                await target.open()
            await target.close()
        http = targets_of(doors, ApiKeys(), None)[1]
        with pytest.raises(TargetUnusable, match="TLS failed"):
            await http.open()


def test_keys_come_from_a_file_and_from_variables_and_never_from_the_scenario(
    tmp_path: Path,
) -> None:
    values = {
        "name": "x",
        "arrivals": {"kind": "offline", "sessions": 1},
        "workload": {"kind": "fixed", "isl": 1, "osl": 1},
        "mix": [{"tenant": "a", "api_key_env": "KEY_A"}, {"tenant": "b"}],
    }
    scenario = parse_scenario(values, "x.yaml")
    file = tmp_path / "key"
    file.write_text("of-file\n")

    keys = read_keys(scenario, {"KEY_A": "of-a", KEY_VARIABLE: "of-all"}, None)
    assert (keys.of("a"), keys.of("b"), keys.of("")) == ("of-a", "of-all", "of-all")
    assert read_keys(scenario, {"KEY_A": "of-a"}, file).of("b") == "of-file"
    with pytest.raises(ConfigError, match="the variable KEY_A is not set"):
        read_keys(scenario, {}, None)


def test_one_tenant_has_one_key() -> None:
    shares = [{"tenant": "a", "api_key_env": name} for name in ("KEY_1", "KEY_2")]
    scenario = parse_scenario(
        {
            "name": "x",
            "arrivals": {"kind": "offline", "sessions": 1},
            "workload": {"kind": "fixed", "isl": 1, "osl": 1},
            "mix": shares,
        },
        "x",
    )
    assert read_keys(scenario, {"KEY_1": "k", "KEY_2": "k"}, None).of("a") == "k"
    with pytest.raises(ConfigError, match="two shares of tenant a have different keys"):
        read_keys(scenario, {"KEY_1": "k", "KEY_2": "other"}, None)
