"""Certificates from files: servers and clients that take rotated ones without a restart."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509

from services.common.bounded_file import read_bounded
from services.common.clock import Clock
from services.common.config import TlsSettings
from services.common.errors import ConfigError
from services.common.secret import Secret
from services.runtime.watched_file import WatchedFile

_MAX_FILE_BYTES = 1 << 20
SAN = "x509_subject_alternative_name"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where one side's certificate lies, PEM."""

    cert: Path  # its chain, leaf first
    key: Path
    ca: Path | None = None  # who signs the other side's; None = nobody is asked for one

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)


@dataclass(frozen=True, slots=True)
class Material:
    """What the files hold, known to fit together."""

    chain: bytes
    key: Secret
    ca: bytes | None
    names: tuple[str, ...]  # DNS names of the leaf
    expires_unix_s: float
    context: ssl.SSLContext  # of a server


class TlsIdentity:
    """One certificate, as it is in its files now. May be asked from any thread.

    Connections that are open keep what they were made with; the next handshake has the new one.
    Files that do not fit together, as in the middle of a rotation, change nothing.
    """

    def __init__(self, name: str, files: TlsFiles, clock: Clock, poll_s: float = 1.0) -> None:
        """Read the files; `name` is the setting, for messages. Raises ConfigError."""
        self._watched = WatchedFile(
            name, files.paths, lambda: read_material(name, files), clock, poll_s
        )

    def material(self) -> Material:
        """Give what is valid now."""
        return self._watched.get()

    def expires(self) -> float:
        """Give the end of the certificate, Unix seconds."""
        return self.material().expires_unix_s

    def server_credentials(self) -> grpc.ServerCredentials:
        """Make credentials of a gRPC server; with a CA its clients need a certificate of it."""
        shown = self.material()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            material = self.material()
            if material is shown:
                return None
            shown = material
            return _server_configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(shown),
            fetch,  # type: ignore[arg-type]  # the stub lacks None, which stands for "as before"
            require_client_authentication=shown.ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Make credentials of a gRPC channel; Python's cannot be changed once they are made."""
        material = self.material()
        return grpc.ssl_channel_credentials(material.ca, material.key.reveal(), material.chain)

    def server_context(self) -> ssl.SSLContext:
        """Make a context for HTTPS, in which every handshake is handed to the newest one."""
        outer = _new_context()

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.material().context

        outer.sni_callback = choose  # called with or without a name
        return outer


def pinned_credentials(material: Material) -> grpc.ChannelCredentials:
    """Make credentials of a client that takes this very certificate, whoever has signed it."""
    return grpc.ssl_channel_credentials(material.chain)


def read_material(name: str, files: TlsFiles) -> Material:
    """Read and check the files; ConfigError says what is wrong, naming them by their setting."""
    chain, key = (read_bounded(name, path, _MAX_FILE_BYTES) for path in (files.cert, files.key))
    ca = None if files.ca is None else read_bounded(name, files.ca, _MAX_FILE_BYTES)
    context = _new_context()
    try:
        # A key with a passphrase must not ask for it on the terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (ssl.SSLError, OSError):
        raise ConfigError(
            f"{name}: certificate and key are damaged, encrypted or not of each other"
        ) from None
    try:
        leaf = x509.load_pem_x509_certificate(chain)
        if ca is not None and not x509.load_pem_x509_certificates(ca):
            raise ValueError
        names = _dns_names(leaf)
    except ValueError:
        raise ConfigError(f"{name}: a certificate is damaged") from None
    return Material(chain, Secret(key), ca, names, leaf.not_valid_after_utc.timestamp(), context)


def _dns_names(leaf: x509.Certificate) -> tuple[str, ...]:
    with contextlib.suppress(x509.ExtensionNotFound):
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        return tuple(found.value.get_values_for_type(x509.DNSName))
    return ()


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _server_configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key.reveal(), material.chain)], material.ca
    )


def door_identity(tls: TlsSettings, clock: Clock) -> TlsIdentity | None:
    """Read the certificate of the front doors; None = they speak plaintext."""
    if not tls.cert_file:
        return None
    return TlsIdentity("tls.cert_file", TlsFiles(Path(tls.cert_file), Path(tls.key_file)), clock)


def cluster_identity(tls: TlsSettings, clock: Clock) -> TlsIdentity | None:
    """Read the certificate of this process between routers and workers; None = plaintext."""
    if not tls.cluster_cert_file:
        return None
    files = TlsFiles(
        Path(tls.cluster_cert_file), Path(tls.cluster_key_file), Path(tls.cluster_ca_file)
    )
    return TlsIdentity("tls.cluster_cert_file", files, clock)
