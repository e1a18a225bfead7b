from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from services.common.clock import ManualClock
from services.common.config import load_config
from services.common.errors import ConfigError
from services.runtime.dev_certs import CA_NAME
from services.runtime.tls import (
    TlsFiles,
    TlsIdentity,
    cluster_identity,
    door_identity,
    read_material,
)
from tests.support.certs import make_certs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_certs(directory)
    return directory


@pytest.fixture
def certs(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "certs")


def files(certs: Path) -> TlsFiles:
    return TlsFiles(certs / "worker.pem", certs / "worker.key", certs / "ca.pem")


def test_development_certificates_are_of_one_authority_and_private(certs: Path) -> None:
    authority = x509.load_pem_x509_certificate((certs / "ca.pem").read_bytes())
    for name in ("doors", "router", "worker"):
        leaf = x509.load_pem_x509_certificate((certs / f"{name}.pem").read_bytes())
        leaf.verify_directly_issued_by(authority)
        assert (certs / f"{name}.key").stat().st_mode & 0o777 == 0o600
    assert CA_NAME in authority.subject.rfc4514_string()


def test_material_names_its_leaf_and_its_end(certs: Path) -> None:
    material = read_material("tls.x", files(certs))
    assert material.names == ("isthmus-worker",)
    leaf = x509.load_pem_x509_certificate(material.chain)
    assert material.expires_unix_s == leaf.not_valid_after_utc.timestamp()
    assert "PRIVATE KEY" not in repr(material)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another key": (
        lambda certs: shutil.copy(certs / "router.key", certs / "worker.key"), "not of each other",
    ),
    "no certificate": (lambda certs: (certs / "worker.pem").write_text("x"), "damaged"),
    "no key": (lambda certs: (certs / "worker.key").unlink(), "cannot be read"),
    "no authority": (lambda certs: (certs / "ca.pem").write_text("x"), "damaged"),
    "too large": (lambda certs: (certs / "ca.pem").write_bytes(b"x" * (1 << 21)), "larger"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_files_that_do_not_fit_are_refused_by_their_setting(certs: Path, name: str) -> None:
    damage, why = DAMAGE[name]
    damage(certs)
    with pytest.raises(ConfigError, match=f"tls.x: .*{why}") as caught:
        read_material("tls.x", files(certs))
    assert "PRIVATE" not in str(caught.value)


def test_half_a_rotation_changes_nothing_and_the_whole_does(certs: Path) -> None:
    """RB-093: key and certificate are replaced one after the other."""
    clock = ManualClock()
    identity = TlsIdentity("tls.x", files(certs), clock)
    before, new = identity.material(), certs.parent / "new"
    shutil.copytree(certs, new)
    make_certs(new)
    shutil.copy(new / "worker.key", certs / "worker.key")
    clock.advance(1.0)
    assert identity.material() is before
    shutil.copy(new / "worker.pem", certs / "worker.pem")
    clock.advance(1.0)
    assert identity.material().chain == (new / "worker.pem").read_bytes() != before.chain
    assert identity.material().context is not before.context


def test_settings_lead_to_identities(certs: Path) -> None:
    clock = ManualClock()
    assert door_identity(load_config(None, {}, {}).tls, clock) is None
    assert cluster_identity(load_config(None, {}, {}).tls, clock) is None
    config = load_config(
        None,
        {},
        {
            "tls.cert_file": str(certs / "doors.pem"),
            "tls.key_file": str(certs / "doors.key"),
            "tls.cluster_cert_file": str(certs / "router.pem"),
            "tls.cluster_key_file": str(certs / "router.key"),
            "tls.cluster_ca_file": str(certs / "ca.pem"),
            "router.grpc_host": "10.0.0.1",
            "auth.keys_file": "k",
        },
    )
    doors, cluster = door_identity(config.tls, clock), cluster_identity(config.tls, clock)
    assert doors is not None
    assert cluster is not None
    assert (doors.material().ca, doors.material().names) == (None, ("localhost",))
    assert cluster.material().ca == (certs / "ca.pem").read_bytes()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls.cert_file": "a"}, "tls.key_file belong together"),
        ({"tls.key_file": "a"}, "tls.key_file belong together"),
        ({"tls.cluster_cert_file": "a", "tls.cluster_key_file": "b"}, "set all or none"),
        ({"router.grpc_host": "10.0.0.1", "auth.keys_file": "k"}, "without TLS: set tls.cert_file"),
        ({"auth.jwks_file": "a", "auth.jwt_issuer": "b"}, "jwt_audience"),
    ],
)
def test_half_a_configuration_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {}, settings)
