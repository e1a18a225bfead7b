"""Certificates for development and tests: an authority of one's own, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.errors import ConfigError
from services.common.private_file import replace_private

CA_NAME = "isthmus development authority"
_SKEW = datetime.timedelta(minutes=5)  # clocks of other machines


@dataclass(frozen=True, slots=True)
class Leaf:
    """One certificate to make: its file name without ending, and whom it names."""

    name: str
    hosts: Sequence[str]  # DNS names and IP addresses


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_dev_certs(
    directory: Path, leaves: Sequence[Leaf], days: int, now: datetime.datetime
) -> None:
    """Write `NAME.pem` and `NAME.key` for every leaf, signed by `ca.pem`, which is made once.

    Called again it makes new leaves under the same authority, which is a rotation.
    """
    authority = _authority(directory, days, now)
    for leaf in leaves:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(leaf.name, authority.cert.subject, key, days, now)
        names = x509.SubjectAlternativeName([_general_name(host) for host in leaf.hosts])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        cert = (
            builder.add_extension(names, critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
                critical=False,
            )
            .sign(authority.key, hashes.SHA256())
        )
        _write(directory, leaf.name, cert, key)


def _authority(directory: Path, days: int, now: datetime.datetime) -> Authority:
    cert_file, key_file = directory / "ca.pem", directory / "ca.key"
    if not cert_file.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CA_NAME)])
        cert = (
            _builder(CA_NAME, subject, key, 10 * days, now)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        _write(directory, "ca", cert, key)
        return Authority(cert, key)
    try:
        cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
        loaded = serialization.load_pem_private_key(key_file.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{directory} holds no authority that can be used again") from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_file} is not a key this command has made")
    return Authority(cert, loaded)


def _builder(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    now: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(
    directory: Path, name: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    replace_private(directory / f"{name}.key", pem.decode())
    replace_private(
        directory / f"{name}.pem", cert.public_bytes(serialization.Encoding.PEM).decode()
    )
