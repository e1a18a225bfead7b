"""The few calls to a Kubernetes API server that we make. Never run on a cluster.

Plain JSON over HTTP: the official client would bring a model of everything. Inside a cluster the
pod's own account is used; elsewhere `kubectl proxy` serves one on loopback.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

from services.autoscaler.driver import DriverError
from services.common.address import join_host_port
from services.common.bounded_file import read_secret
from services.common.errors import ConfigError

# Any: what Kubernetes answers, nested mappings of whatever.
Resource = dict[str, Any]

CALL_TIMEOUT_S = 3.0
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_ANSWER_BYTES = 32 << 20
_PAGE = 500
_MAX_PAGES = 20
_MAX_TOKEN_BYTES = 64 << 10


class KubeError(DriverError):
    """The API server refused; `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubeApi:
    """One namespace of one cluster. Belongs to the event loop."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        token_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Prepare; nothing is opened yet. The token is read for every call: it is rotated."""
        if token_file is not None and not url.startswith("https://"):
            raise ConfigError(f"kubernetes: a token is not sent to {url}, which is not https")
        self.namespace = namespace
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def in_cluster(
        cls,
        environ: Mapping[str, str] = os.environ,
        account: Path = _ACCOUNT,
        namespace: str = "",
    ) -> Self:
        """Use the account of the pod we run in, and its namespace; ConfigError where none is."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port or not port.isdigit():
            raise ConfigError("kubernetes: not in a pod: KUBERNETES_SERVICE_HOST is not set")
        try:
            own = (account / "namespace").read_text(encoding="utf-8").strip()
            tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"kubernetes: {account} cannot be read ({error})") from None
        url = f"https://{join_host_port(host, int(port))}"
        return cls(url, namespace or own, token_file=account / "token", tls=tls)

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Resource:
        """Read a resource. `path` begins with the group: apis/apps/v1/... Raises DriverError."""
        return await self._call("GET", path, params=params)

    async def put(self, path: str, body: Resource) -> Resource:
        """Replace a resource; KubeError with status 409 if it has changed since it was read."""
        return await self._call("PUT", path, body=body)

    async def merge_patch(self, path: str, body: Resource) -> Resource:
        """Change what `body` names: mappings are merged, lists replaced."""
        return await self._call("PATCH", path, body=body, kind="application/merge-patch+json")

    async def create(self, path: str, body: Resource) -> Resource:
        """Make a resource; KubeError with status 409 if it is there already."""
        return await self._call("POST", path, body=body)

    async def apply(self, path: str, body: Resource, manager: str) -> Resource:
        """Have a resource be as `body` says, wherever others disagree: server-side apply."""
        kind = "application/apply-patch+yaml"  # JSON is YAML
        params = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", path, params=params, body=body, kind=kind)

    async def delete(self, path: str) -> Resource:
        """Remove a resource, and what belongs to it after it."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        return await self._call("DELETE", path, body=body)

    async def pods(self, selector: str) -> list[Resource]:
        """Return all pods with these labels."""
        return await self.listed(f"api/v1/namespaces/{self.namespace}/pods", selector)

    async def listed(self, path: str, selector: str = "") -> list[Resource]:
        """Return all resources of a kind with these labels, page by page."""
        found = list[Resource]()
        params = {"labelSelector": selector, "limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            page = await self.get(path, params)
            found += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return found
            params = {**params, "continue": more}
        raise DriverError(f"{path}: more than {_PAGE * _MAX_PAGES} have the labels {selector}")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Resource | None = None,
        kind: str = "application/json",
    ) -> Resource:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = kind
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token(self._token_file)}"
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._opened().request(
                method, f"{self._url}/{path}", params=params, data=data, headers=headers,
                ssl=self._tls or True, allow_redirects=False,
            ) as answer:  # fmt: skip
                content = await _content(answer)
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise DriverError(f"{method} {path}: the API server does not answer: {why}") from None
        return _resource(f"{method} {path}", status, content)

    def _token(self, path: Path) -> str:
        try:
            return read_secret("kubernetes token", path, 1, _MAX_TOKEN_BYTES).reveal().decode()
        except (ConfigError, UnicodeDecodeError) as error:
            raise DriverError(str(error)) from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=False)
        return self._session


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            raise DriverError(f"the API server answered with more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _resource(call: str, status: int, content: bytes) -> Resource:
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        found = None
    if status >= 300:
        told = found.get("message", "") if isinstance(found, dict) else ""
        raise KubeError(status, f"{call}: {status} {str(told)[:300]}".rstrip())
    if not isinstance(found, dict):
        raise DriverError(f"{call}: the API server answered in an unknown form")
    return found
