"""The stand-in over HTTP: who calls, what they ask for, and in which form they are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from aiohttp import web

from tests.fakekube import discovery
from tests.fakekube.access import Call
from tests.fakekube.api import Options, Target
from tests.fakekube.errors import ApiError
from tests.fakekube.kinds import Kind, Resource
from tests.fakekube.kube import FakeKube, Fault
from tests.fakekube.protobuf import read_protobuf
from tests.fakekube.selectors import Matches, field_selector, label_selector
from tests.fakekube.tables import metadata_only, table
from tests.fakekube.watches import Asked, Watch

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_MAX_BODY_BYTES = 16 << 20
_WATCH_TIMEOUT_S = 300.0
_GONE = 499


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, read."""

    target: Target
    verb: str
    user: str


class Server:
    """Handlers of one stand-in."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    def app(self) -> web.Application:
        """What aiohttp runs."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            user = self._kube.user_of(request.headers)
            answer = await self._answer(request, user)
        except ApiError as error:
            return _refusal(error)
        return answer

    async def _answer(self, request: web.Request, user: str) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if request.path == _REVIEWS and request.method == "POST":
            return web.json_response(self._review(await _body(request), user), status=201)
        asked = self._read(request, parts, user)
        if asked is None:
            return self._document(request, parts)
        call = _call(request, asked)
        status = _GONE  # unless it stays until it is answered, as those who watch do not
        try:
            await self._injected(self._kube.fault_for(call))
            self._kube.access.check(call)
            answer = await self._resource(request, asked)
            status = answer.status
        except ApiError as error:
            status = error.status
            raise
        finally:
            self._kube.access.log.append((call, status))
        return answer

    async def _injected(self, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.status:
            wait_s = fault.retry_after_s if fault.status == 429 else None
            raise ApiError(fault.status, "as the test asked for", retry_after_s=wait_s)

    # -- paths ---------------------------------------------------------------------------------

    def _document(self, request: web.Request, parts: list[str]) -> web.Response:
        kinds, accept = self._kube.kinds, request.headers.get("Accept", "")
        is_aggregated = "as=APIGroupDiscoveryList" in accept and "v=v2;" in f"{accept};"
        if parts in (["api"], ["apis"]) and is_aggregated:
            found = discovery.aggregated(kinds, core=parts == ["api"])
            headers = {"Content-Type": discovery.AGGREGATED}
            return web.Response(body=json.dumps(found), headers=headers)
        found_or_none = self._plain_document(parts)
        if found_or_none is None:
            raise ApiError(404, "the server could not find the requested resource")
        return web.json_response(found_or_none)

    def _plain_document(self, parts: list[str]) -> Resource | None:
        kinds = self._kube.kinds
        match parts:
            case ["version"]:
                return {
                    "major": "1",
                    "minor": "37",
                    "gitVersion": "v1.37.0",
                    "platform": "linux/amd64",
                }
            case ["healthz" | "readyz" | "livez"]:
                return {"status": "ok"}
            case ["api"]:
                return discovery.api_versions()
            case ["apis"]:
                return discovery.api_groups(kinds)
            case ["api", version]:
                return discovery.api_resources(kinds, "", version)
            case ["apis", group]:
                return discovery.api_group(kinds, group)
            case ["apis", group, version]:
                return discovery.api_resources(kinds, group, version)
            case ["openapi", "v3"]:
                return discovery.openapi_index(kinds)
            case ["openapi", "v3", *rest]:
                return discovery.openapi_document(kinds, "/".join(rest))
        return None

    def _read(self, request: web.Request, parts: list[str], user: str) -> _Asked | None:
        """Read what is asked for; None = it is no resource."""
        match parts:
            case ["api", version, *rest] if rest:
                group = ""
            case ["apis", group, version, *rest] if rest:
                pass
            case _:
                return None
        space = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            space, rest = rest[1], rest[2:]
        kind = self._kube.kinds.find(group, version, rest[0])
        if kind is None or len(rest) > 3:
            raise ApiError(404, "the server could not find the requested resource")
        target = Target(kind, space, *rest[1:])
        if target.sub and target.sub not in kind.subresources:
            raise ApiError(404, "the server could not find the requested resource")
        return _Asked(target, _verb(request, target), user)

    # -- resources -----------------------------------------------------------------------------

    async def _resource(self, request: web.Request, asked: _Asked) -> web.StreamResponse:
        api, target = self._kube.api, asked.target
        api.warnings.clear()
        if asked.verb == "watch":
            return await self._watch(request, target)
        if asked.verb in ("get", "list"):
            return self._reading(request, asked)
        body = await _body(request)
        options = _options(request)
        if asked.verb == "create":
            return self._shown(request, target.kind, self._create(asked, body, options), 201)
        if asked.verb == "update":
            return self._shown(request, target.kind, api.replace(target, body, options))
        if asked.verb == "patch":
            return self._patch(request, asked, body, options)
        if asked.verb == "delete":
            return self._shown(request, target.kind, api.delete(target, _delete(request, body)))
        matches = _matches(request)
        return web.json_response(api.delete_all(target, matches, _delete(request, body)))

    def _create(self, asked: _Asked, body: Resource, options: Options) -> Resource:
        target = asked.target
        if target.sub != "token":
            return self._kube.api.create(target, body, options)
        self._kube.api.get(Target(target.kind, target.namespace, target.name))
        token = self._kube.token_of(target.namespace, target.name)
        status = {"token": token, "expirationTimestamp": self._kube.store.timestamp()}
        return {**body, "status": status}

    def _patch(
        self, request: web.Request, asked: _Asked, body: Any, options: Options
    ) -> web.Response:
        target, store = asked.target, self._kube.store
        there = store.find(target.kind.key, target.namespace, target.name)
        if there is None and request.content_type == "application/apply-patch+yaml":
            call = _call(request, asked)
            create = Call(call.user, "create", call.group, call.resource, call.namespace)
            self._kube.access.check(create)
            self._kube.access.log.append((create, 201))
        after = self._kube.api.patch(target, request.content_type, body, options)
        return self._shown(request, target.kind, after, 201 if there is None else 200)

    def _reading(self, request: web.Request, asked: _Asked) -> web.Response:
        api, target = self._kube.api, asked.target
        if target.sub == "log":
            pod = api.get(Target(target.kind, target.namespace, target.name))
            return web.Response(text=self._kube.pods.plan(pod).log)
        if target.name:
            return self._shown(request, target.kind, api.get(target))
        query = request.query
        limit, after = int(query.get("limit") or 0), query.get("continue", "")
        return self._shown(request, target.kind, api.list(target, _matches(request), limit, after))

    def _shown(
        self, request: web.Request, kind: Kind, found: Resource, status: int = 200
    ) -> web.Response:
        """Answer in the form that is asked for."""
        shown = self._form(request, kind, found)
        headers = [("Warning", f"299 - {json.dumps(text)}") for text in self._kube.api.warnings]
        text = json.dumps(shown)
        return web.Response(
            text=text, status=status, headers=headers, content_type="application/json"
        )

    def _form(self, request: web.Request, kind: Kind, found: Resource) -> Resource:
        accept = request.headers.get("Accept", "")
        if found.get("kind") == "Status":
            return found
        if "as=Table" in accept:
            include = request.query.get("includeObject", "Metadata")
            return table(kind, found, self._kube.clock.unix_ms() / 1000, include)
        if "as=PartialObjectMetadataList" in accept and "items" in found:
            items = [metadata_only(item) for item in found["items"]]
            own = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
            return {**found, **own, "items": items}
        if "as=PartialObjectMetadata" in accept and "items" not in found:
            return metadata_only(found)
        return found

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = request.query
        asked = Asked(
            target.kind,
            target.namespace,
            _matches(request, target.name),
            query.get("resourceVersion", ""),
            query.get("sendInitialEvents") == "true",
            query.get("allowWatchBookmarks") == "true",
            float(query.get("timeoutSeconds") or _WATCH_TIMEOUT_S),
        )
        watch = self._kube.watches.open(asked)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
            await self._stream(request, response, watch)
        except ConnectionError:
            pass  # whoever watched has gone
        finally:
            self._kube.watches.end(watch)
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, watch: Watch
    ) -> None:
        asked = watch.asked
        try:
            async with asyncio.timeout(asked.timeout_s):
                while (event := await watch.queue.get()) is not None:
                    await self._tell(request, response, asked, event)
        except TimeoutError:
            if asked.wants_bookmarks:
                last = self._kube.watches.bookmark(asked)
                await self._tell(request, response, asked, last)
        await response.write_eof()

    async def _tell(
        self, request: web.Request, response: web.StreamResponse, asked: Asked, event: Resource
    ) -> None:
        shown = event
        if event["type"] not in ("BOOKMARK", "ERROR"):
            shown = {**event, "object": self._form(request, asked.kind, event["object"])}
        await response.write(json.dumps(shown).encode() + b"\n")

    def _review(self, body: Resource, user: str) -> Resource:
        """Say whether the caller could do something, as `kubectl auth can-i` asks."""
        asked = body.get("spec", {}).get("resourceAttributes") or {}
        sub = asked.get("subresource")
        resource = f"{asked.get('resource', '')}/{sub}" if sub else asked.get("resource", "")
        call = Call(
            user, asked.get("verb", ""), asked.get("group", ""), resource,
            asked.get("namespace", ""), asked.get("name", ""),
        )  # fmt: skip
        try:
            self._kube.access.check(call)
        except ApiError:
            return {**body, "status": {"allowed": False}}
        return {**body, "status": {"allowed": True}}


def _refusal(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return web.json_response(error.body(), status=error.status, headers=headers)


def _verb(request: web.Request, target: Target) -> str:
    is_watched = request.query.get("watch") in ("true", "1")
    if request.method == "GET":
        if is_watched:
            return "watch"
        return "get" if target.name else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if request.method not in _VERBS:
        raise ApiError(405, f"{request.method} is not allowed here")
    return _VERBS[request.method]


def _call(request: web.Request, asked: _Asked) -> Call:
    target, name = asked.target, asked.target.name
    if asked.verb in ("list", "watch") and not name:
        pairs = request.query.get("fieldSelector", "").split(",")
        named = [pair.partition("=")[2] for pair in pairs if pair.startswith("metadata.name=")]
        name = named[0].lstrip("=") if named else ""
    resource = f"{target.kind.plural}/{target.sub}" if target.sub else target.kind.plural
    # A namespace is asked for by its own name.
    space = target.name if target.kind.plural == "namespaces" else target.namespace
    return Call(asked.user, asked.verb, target.kind.group, resource, space, name)


def _matches(request: web.Request, name: str = "") -> Matches:
    tests = [label_selector(request.query.get("labelSelector", ""))]
    tests.append(field_selector(request.query.get("fieldSelector", "")))
    if name:
        tests.append(field_selector(f"metadata.name={name}"))

    def matches(resource: Mapping[str, Any]) -> bool:
        return all(test(resource) for test in tests)

    return matches


def _options(request: web.Request) -> Options:
    query = request.query
    client = request.headers.get("User-Agent", "unknown").partition("/")[0]
    return Options(
        manager=query.get("fieldManager") or client,
        force=query.get("force") in ("true", "1"),
        is_dry="All" in query.getall("dryRun", []),
        validation=query.get("fieldValidation") or "Warn",
    )


def _delete(request: web.Request, body: Any) -> Resource:
    asked: Resource = dict(body) if isinstance(body, dict) else {}
    query = request.query
    if "propagationPolicy" in query:
        asked["propagationPolicy"] = query["propagationPolicy"]
    if "gracePeriodSeconds" in query:
        asked["gracePeriodSeconds"] = int(query["gracePeriodSeconds"])
    if "dryRun" in query:
        asked["dryRun"] = query.getall("dryRun")
    return asked


async def _body(request: web.Request) -> Any:
    content = await request.read()
    if not content:
        return {}
    if request.content_type == "application/vnd.kubernetes.protobuf":
        return read_protobuf(content)
    try:
        return json.loads(content)
    except ValueError:
        pass
    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None
