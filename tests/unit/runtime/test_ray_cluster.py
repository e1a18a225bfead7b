"""What is decided about Ray before it is started: tokens, addresses, what a worker takes."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.runtime import ray_cluster
from services.runtime.ray_actor import WorkerOrder
from services.runtime.ray_cluster import Placement, RayCluster, new_name


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"isthmus\[ray\]"):
        RayCluster.start("test", tmp_path, {}, {})
    with pytest.raises(ConfigError, match=r"isthmus\[ray\]"):
        RayCluster.connect("auto", "test", {})


def test_a_ray_of_our_own_asks_for_a_token_that_nobody_else_can_read(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    ray_cluster._use_token(environ, tmp_path)
    path = Path(environ["RAY_AUTH_TOKEN_PATH"])
    assert environ["RAY_AUTH_MODE"] == "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32


@pytest.mark.parametrize(
    "environ",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_TOKEN": "t"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/etc/ray/token"},
    ],
)
def test_what_the_operator_says_of_tokens_stands(environ: dict[str, str], tmp_path: Path) -> None:
    given = dict(environ)
    ray_cluster._use_token(environ, tmp_path)
    assert environ == {"RAY_AUTH_MODE": "token", **given}
    assert not list(tmp_path.iterdir())


def test_a_cluster_is_not_joined_without_its_token(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH"):
        ray_cluster._require_token(environ)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    ray_cluster._require_token(environ)
    assert environ["RAY_AUTH_MODE"] == "token"
    ray_cluster._require_token({"RAY_AUTH_MODE": "disabled", "HOME": "/nowhere"})


def test_a_ray_client_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match="on a node of the cluster"):
        RayCluster.connect("ray://head:10001", "test", {"RAY_AUTH_MODE": "disabled"})


def test_every_rank_of_a_replica_gets_a_bundle_of_its_own() -> None:
    one = Placement({"decode_slot": 1.0})
    assert one.bundles() == [{"decode_slot": 1.0}]
    four = Placement({"decode_slot": 1.0}, num_gpus=1.0, num_bundles=4)
    assert four.bundles() == [{"decode_slot": 1.0, "GPU": 1.0}] * 4


def test_names_tell_the_role_and_are_never_used_twice() -> None:
    names = {new_name("prefill") for _ in range(100)}
    assert len(names) == 100
    assert {name.rpartition("-")[0] for name in names} == {"prefill"}


def test_an_order_that_is_quoted_in_an_error_tells_no_settings() -> None:
    order = WorkerOrder("a:b", ("--role", "decode"), "store: {url: 'redis://:secret@h'}", "")
    assert "secret" not in repr(order)
    assert "--role decode" in repr(order)
