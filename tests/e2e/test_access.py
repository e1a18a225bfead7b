"""A whole cluster behind keys and certificates: who gets in, what is kept apart, what is told."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from services.chaos.scripted_model import make_scripted_model
from services.cli.main import run
from services.gateway.keys import create_key
from services.gateway.usage import read_all

pytestmark = pytest.mark.e2e

SENTINEL = "kumquat-9f3a"
PROMPT = f"{SENTINEL} " * 40
TIMEOUT_S = 60.0
# Without a start of its own: text that is in no prompt, for what the clients get wrong.
WRONG = "tamarillo-77c1"


class Secured:
    """`isthmus up` with everything on."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.certs, self.logs = directory / "certs", directory / "logs"
        self.trace, self.status_file = directory / "trace.jsonl", directory / "status.json"
        assert run(["cert", "dev", "--dir", str(self.certs)]) == 0
        keys = directory / "keys.json"
        assert run(["key", "tenant-secret", "--file", str(directory / "tenant.secret")]) == 0
        self.acme, _ = create_key(keys, "acme", "", 0, ("inference",))
        self.other, _ = create_key(keys, "other", "", 0, ("inference",))
        self.ops, _ = create_key(keys, "ops", "", 0, ("monitor",))
        self.admin, _ = create_key(keys, "admin", "", 0, ("admin", "monitor"))
        config = {
            "tls": {
                "cert_file": str(self.certs / "doors.pem"),
                "key_file": str(self.certs / "doors.key"),
                "cluster_cert_file": str(self.certs / "cluster.pem"),
                "cluster_key_file": str(self.certs / "cluster.key"),
                "cluster_ca_file": str(self.certs / "ca.pem"),
            },
            "auth": {"keys_file": str(keys), "tenants_file": str(directory / "tenants.yaml")},
            "accounting": {
                "audit_dir": str(directory / "audit"),
                "usage_dir": str(directory / "usage"),
            },
            "telemetry": {"trace_file": str(self.trace), "log_level": "debug"},
        }
        (directory / "tenants.yaml").write_text("default: {requests_per_s: 1000}\n")
        self.config = directory / "isthmus.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.model = make_scripted_model(directory / "model")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until requests are handed from prefill to decode."""
        with (self.dir / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.cli.main", "up", "--engine", "scripted"),
                    *("--config", str(self.config), "--model", str(self.model)),
                    *("--grpc-port", "0", "--http-port", "0", "--log-dir", str(self.logs)),
                    *("--json-status", str(self.status_file)),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + TIMEOUT_S
        while not self.is_ready():
            assert time.monotonic() < end, (self.dir / "up.log").read_text()
            assert self.process.poll() is None, (self.dir / "up.log").read_text()
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Whether all is up and knows each other."""
        if self.status().get("state") != "ready":
            return False
        headers = {"x-isthmus-force-mode": "REMOTE"}
        return self.ask(self.acme, "warm", headers).status_code == 200

    def status(self) -> dict[str, Any]:
        """The status file; empty while there is none."""
        try:
            found: dict[str, Any] = json.loads(self.status_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return found

    def router(self, port: str) -> str:
        """Address of the router's `grpc` or `http` door."""
        (found,) = (p[port] for p in self.status()["processes"] if p["role"] == "router")
        return str(found)

    def http(self) -> httpx.Client:
        """A client that knows the authority."""
        context = ssl.create_default_context(cafile=self.certs / "ca.pem")
        url = f"https://{self.router('http')}"
        return httpx.Client(base_url=url, verify=context, trust_env=False, timeout=TIMEOUT_S)

    def ask(self, key: str, prompt: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        """Complete a prompt."""
        body = {"model": "scripted", "prompt": prompt, "max_tokens": 8}
        with self.http() as http:
            return http.post(
                "/v1/completions",
                json=body,
                headers={"authorization": f"Bearer {key}", **(headers or {})},
            )

    def cached(self, key: str) -> int:
        """Complete the long prompt; give how much of it was cached."""
        answer = self.ask(key, PROMPT)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def stop(self) -> None:
        """Stop as an operator would."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(TIMEOUT_S) == 0
            finally:
                process.kill()

    def cli(self, command: str, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command against the router."""
        environ = {**os.environ, "ISTHMUS_API_KEY": key, "COLUMNS": "200"}
        address = ("--server", self.router("grpc"), "--ca-file", str(self.certs / "ca.pem"))
        return subprocess.run(
            [sys.executable, "-m", "services.cli.main", command, *address, *arguments],
            env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip

    def secrets(self) -> list[str]:
        """What nobody may find anywhere: keys, the tenants' secret, private keys, prompts."""
        private = [line for path in self.certs.glob("*.key") for line in path.read_text().split()]
        return [
            *(key.rsplit("-", 1)[-1] for key in (self.acme, self.other, self.ops, self.admin)),
            (self.dir / "tenant.secret").read_text().strip(),
            *(line for line in private if len(line) > 40),
            *(SENTINEL, WRONG),
        ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    secured = Secured(tmp_path_factory.mktemp("secured"))
    try:
        secured.start()
        yield secured
    finally:
        secured.stop()


def test_tenants_share_no_cached_prefix(cluster: Secured) -> None:
    """RB-040, G13: a tenant hits its own prefixes and never those of another."""
    assert cluster.cached(cluster.acme) == 0
    assert cluster.cached(cluster.acme) > 0
    assert cluster.cached(cluster.other) == 0
    assert cluster.cached(cluster.other) > 0


def test_the_commands_speak_tls_and_know_their_place(cluster: Secured) -> None:
    shown = cluster.cli("status", "--json", "--config", str(cluster.config), key=cluster.ops)
    assert shown.returncode == 0, shown.stderr
    workers = json.loads(shown.stdout)["workers"]
    assert {w["state"] for w in workers} == {"live"}
    assert all(w["worker"]["requests_open"] == 0 for w in workers)  # asked over mTLS
    for key, why in ((cluster.acme, "permission_denied"), ("", "unauthenticated")):
        refused = cluster.cli("status", key=key)
        assert refused.returncode == 1
        assert why in refused.stderr


def test_nothing_secret_is_told_anywhere(cluster: Secured) -> None:
    """RB-118, RB-119, G14: logs, traces, metrics, status, diagnostics, audit log, errors."""
    answers = [
        cluster.ask(cluster.acme, PROMPT),
        cluster.ask(cluster.acme, [[WRONG]]),
        cluster.ask(f"isk-0123456789ab-{WRONG}", PROMPT),
        cluster.ask(cluster.acme, PROMPT, {"x-isthmus-force-mode": WRONG}),
        cluster.ask(cluster.ops, PROMPT),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 401, 400, 403]
    with cluster.http() as http:
        headers = {"authorization": f"Bearer {cluster.ops}"}
        metrics = http.get("/metrics", headers=headers).text
        body = {"model": "scripted", "prompt": PROMPT, "logit_bias": {WRONG: 1}}
        headers = {"authorization": f"Bearer {cluster.acme}"}
        answers.append(http.post("/v1/completions", json=body, headers=headers))
    status = cluster.cli("status", "--json", "--config", str(cluster.config), key=cluster.ops)
    texts = {"metrics": metrics, "status": status.stdout + status.stderr}
    texts |= {f"answer {i}": a.text + str(a.headers) for i, a in enumerate(answers[1:])}
    kept = ("up.log", "status.json", "trace.jsonl", "logs/*", "audit/*", "usage/*")
    files = [path for pattern in kept for path in cluster.dir.glob(pattern)]
    assert len(files) >= 8
    texts |= {str(path): path.read_text(errors="replace") for path in files}
    # What clients read names no path either.
    assert not [a.text for a in answers if str(cluster.dir) in a.text + str(a.headers)]
    bundle = cluster.dir / "bundle.tar.gz"
    made = cluster.cli("admin", "bundle", str(bundle), key=cluster.admin)
    assert made.returncode == 0, made.stderr
    with tarfile.open(bundle) as archive:
        inside = [(entry.name, archive.extractfile(entry)) for entry in archive]
        texts |= {name: file.read().decode(errors="replace") for name, file in inside if file}
    assert len([name for name in texts if name.startswith("isthmus-diagnostics")]) > 3
    assert "gateway.request" in texts[str(cluster.logs / "router-0.log")]
    assert "isthmus.request" in texts[str(cluster.trace)]
    secrets = cluster.secrets()
    assert len(secrets) > 10
    assert [(name, s[:12]) for name, text in texts.items() for s in secrets if s in text] == []


def test_accounts_outlive_the_router(cluster: Secured) -> None:
    """Usage goes on counting after a restart, and the audit log is one whole chain."""
    cluster.cached(cluster.other)
    cluster.stop()
    before = read_all(cluster.dir / "usage")
    assert before["other"].cached_tokens > 0
    assert before["acme"].cached_tokens > 0
    cluster.start()
    answer = cluster.ask(cluster.other, PROMPT)
    assert answer.headers["x-ratelimit-limit-requests"] == "1000"
    cluster.stop()
    after = read_all(cluster.dir / "usage")
    assert after["other"].requests == before["other"].requests + 1
    used = answer.json()["usage"]["prompt_tokens"]
    assert after["other"].prompt_tokens == before["other"].prompt_tokens + used
    chain = sorted(str(path) for path in (cluster.dir / "audit").glob("*.jsonl"))
    assert run(["audit", "verify", *chain]) == 0
    events = [json.loads(line) for path in chain for line in Path(path).read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] != "request"] == [
        "router.started", "router.stopped", "router.started", "router.stopped",
    ]  # fmt: skip
