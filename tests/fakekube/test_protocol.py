"""What goes over the wire, as client libraries rely on it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import yaml

from tests.fakekube.access import Call
from tests.fakekube.errors import ApiError
from tests.fakekube.kube import FakeKube, Fault
from tests.fakekube.protobuf import read_protobuf
from tests.fakekube.selectors import field_selector, label_selector
from tests.fakekube.small import CRD
from tests.fakekube.tables import age, find_path

pytestmark = pytest.mark.integration
MAPS = "/api/v1/namespaces/default/configmaps"
MERGE = {"Content-Type": "application/merge-patch+json"}


class Http:
    """A plain client."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def __call__(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        """Call; status and what was answered."""
        async with self.session.request(method, path, **more) as answer:
            return answer.status, await answer.json(content_type=None)


@pytest.fixture
async def http(kube: FakeKube) -> AsyncIterator[Http]:
    """One that is the administrator."""
    tls = ssl.create_default_context(cafile=str(kube.ca_file))
    headers = {"Authorization": f"Bearer {kube.admin_token}"}
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(kube.url, headers=headers, connector=connector) as session:
        yield Http(session)


def add_map(kube: FakeKube, name: str, **labels: str) -> None:
    """Have a ConfigMap with labels."""
    meta = {"name": name, "namespace": "default", "labels": labels}
    kube.post({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})


async def events(http: Http, path: str, until: str, **query: str) -> list[tuple[str, str]]:
    """Types and names that a watch tells, up to this one."""
    told: list[tuple[str, str]] = []
    params = {"watch": "true", **query}
    async with asyncio.timeout(60), http.session.get(path, params=params) as answer:
        async for line in answer.content:
            event = json.loads(line)
            meta = event["object"].get("metadata", {})
            told.append((event["type"], meta.get("name", "")))
            if until in (event["type"], meta.get("name", "")):
                return told
    return told


async def test_who_shows_no_known_token_is_nobody(kube: FakeKube, http: Http) -> None:
    status, body = await http("GET", MAPS, headers={"Authorization": "Bearer other"})
    assert (status, body["reason"]) == (401, "Unauthorized")
    token = kube.token_of("default", "absent")
    status, _ = await http("GET", MAPS, headers={"Authorization": f"Bearer {token}"})
    assert status == 401


async def test_an_account_may_do_what_is_granted_to_it(kube: FakeKube, http: Http) -> None:
    headers = {"Authorization": f"Bearer {kube.token_of('default', 'default')}"}
    status, body = await http("GET", MAPS, headers=headers)
    assert (status, body["reason"]) == (403, "Forbidden")
    user = "system:serviceaccount:default:default"
    assert kube.access.refused(user) == {Call(user, "list", "", "configmaps", "default")}


async def test_lists_come_in_pages(kube: FakeKube, http: Http) -> None:
    for name in "abc":
        add_map(kube, name)
    _, first = await http("GET", MAPS, params={"limit": "2"})
    query = {"limit": "2", "continue": first["metadata"]["continue"]}
    _, second = await http("GET", MAPS, params=query)
    names = [[item["metadata"]["name"] for item in page["items"]] for page in (first, second)]
    assert names == [["a", "b"], ["c"]]
    assert "continue" not in second["metadata"]


async def test_a_watch_tells_what_is_there_and_then_that_this_was_all(
    kube: FakeKube, http: Http
) -> None:
    add_map(kube, "a")
    told = await events(http, MAPS, "BOOKMARK", sendInitialEvents="true")
    assert told == [("ADDED", "a"), ("BOOKMARK", "")]


async def test_an_object_that_no_longer_matches_is_gone_for_who_watches(
    kube: FakeKube, http: Http
) -> None:
    add_map(kube, "a", tier="front")
    version = str(kube.store.version)
    for tier in ("back", "front"):
        body = {"metadata": {"labels": {"tier": tier}}}
        await http("PATCH", f"{MAPS}/a", json=body, headers=MERGE)
    add_map(kube, "end", tier="front")
    query = {"labelSelector": "tier=front", "resourceVersion": version}
    told = await events(http, MAPS, "end", **query)
    assert told == [("DELETED", "a"), ("ADDED", "a"), ("ADDED", "end")]


async def test_a_watch_ends_after_its_time_with_a_bookmark(kube: FakeKube, http: Http) -> None:
    query = {"allowWatchBookmarks": "true", "timeoutSeconds": "1"}
    assert await events(http, MAPS, "never", **query) == [("BOOKMARK", "")]


async def test_a_dropped_watch_ends(kube: FakeKube, http: Http) -> None:
    watching = asyncio.create_task(events(http, MAPS, "never"))
    async with asyncio.timeout(60):
        while not kube.watches.drop_all():  # noqa: ASYNC110  # nothing tells that it is open
            await asyncio.sleep(0.01)
        assert await watching == []


async def test_a_change_of_an_old_version_is_refused(kube: FakeKube, http: Http) -> None:
    add_map(kube, "a")
    _, read = await http("GET", f"{MAPS}/a")
    status, _ = await http("PUT", f"{MAPS}/a", json={**read, "data": {"x": "1"}})
    assert status == 200
    status, body = await http("PUT", f"{MAPS}/a", json={**read, "data": {"x": "2"}})
    assert (status, body["reason"]) == (409, "Conflict")
    assert kube.see("configmaps", "a")["data"] == {"x": "1"}


async def test_a_dry_run_changes_nothing(kube: FakeKube, http: Http) -> None:
    add_map(kube, "a")
    body = {"data": {"x": "1"}}
    query = {"dryRun": "All"}
    _, shown = await http("PATCH", f"{MAPS}/a", json=body, headers=MERGE, params=query)
    assert shown["data"] == {"x": "1"}
    assert "data" not in kube.see("configmaps", "a")


async def test_a_status_is_changed_at_its_own_place_only(kube: FakeKube, http: Http) -> None:
    kube.post(yaml.safe_load(CRD))
    meta = {"name": "one", "namespace": "default"}
    toy = {"apiVersion": "example.dev/v1", "kind": "Toy", "metadata": meta}
    made = kube.post({**toy, "spec": {"colour": "red"}, "status": {"lost": True}})
    assert "status" not in made
    path = "/apis/example.dev/v1/namespaces/default/toys/one"
    both = {"spec": {"colour": "green"}, "status": {"seen": True}}
    await http("PATCH", f"{path}/status", json=both, headers=MERGE)
    found = kube.see("toys.example.dev", "one")
    assert (found["spec"]["colour"], found["status"]) == ("red", {"seen": True})
    assert found["metadata"]["generation"] == 1
    await http("PATCH", path, json=both, headers=MERGE)
    assert kube.see("toys.example.dev", "one")["metadata"]["generation"] == 2


async def test_unknown_fields_are_left_out_with_a_warning(kube: FakeKube, http: Http) -> None:
    body = {"metadata": {"name": "a"}, "dat": {}}
    async with http.session.post(MAPS, json=body) as answer:
        assert answer.status == 201
        assert answer.headers["Warning"] == r'299 - "unknown field \"dat\""'
    status, refused = await http("POST", MAPS, json=body, params={"fieldValidation": "Strict"})
    assert status == 400
    assert 'unknown field "dat"' in refused["message"]


async def test_calls_are_failed_and_delayed_as_often_as_asked(kube: FakeKube, http: Http) -> None:
    kube.faults += [
        Fault(status=500, verb="list", times=2),
        Fault(status=429, verb="list", retry_after_s=7),
        Fault(delay_s=0.01, verb="list"),
    ]
    found = []
    for _ in range(5):
        async with http.session.get(MAPS) as answer:
            found.append((answer.status, answer.headers.get("Retry-After")))
    assert found == [(500, None), (500, None), (429, "7"), (200, None), (200, None)]
    assert (await http("GET", f"{MAPS}/a"))[0] == 404


async def test_what_is_deleted_is_the_object_that_was_meant(kube: FakeKube, http: Http) -> None:
    add_map(kube, "a")
    other = {"preconditions": {"uid": "other"}}
    status, _ = await http("DELETE", f"{MAPS}/a", json=other)
    assert status == 409
    uid = kube.see("configmaps", "a")["metadata"]["uid"]
    await http("DELETE", f"{MAPS}/a", json={"preconditions": {"uid": uid}})
    assert kube.find("configmaps", "a") is None


async def test_old_clients_discover_the_same(kube: FakeKube, http: Http) -> None:
    _, groups = await http("GET", "/apis")
    assert "apps" in {group["name"] for group in groups["groups"]}
    _, resources = await http("GET", "/apis/apps/v1")
    names = {item["name"] for item in resources["resources"]}
    assert {"deployments", "deployments/scale", "deployments/status"} <= names


def test_protobuf_that_ends_early_or_is_none_is_refused() -> None:
    secret = b"k8s\x00\x0a\x0c\x0a\x02v1\x12\x06Secret\x12\x0b\x0a\x09\x0a\x03one\x1a\x02ns"
    read = read_protobuf(secret)
    assert read == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "one", "namespace": "ns"},
    }
    for broken in (b"{}", secret[:-3], secret + b"\xff"):
        with pytest.raises(ApiError):
            read_protobuf(broken)


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("a=1", True),
        ("a==1,b=2", True),
        ("a!=1", False),
        ("c!=1", True),
        ("a in (1, 3),b", True),
        ("a notin (1,3)", False),
        ("!a", False),
        ("!c", True),
    ],
)
def test_label_selectors(selector: str, matches: bool) -> None:
    resource = {"metadata": {"labels": {"a": "1", "b": "2"}}}
    assert label_selector(selector)(resource) is matches


def test_field_selectors_follow_paths() -> None:
    pod = {"metadata": {"name": "a"}, "spec": {"nodeName": "n"}}
    assert field_selector("metadata.name=a,spec.nodeName!=other")(pod)
    assert not field_selector("status.phase=Running")(pod)


def test_paths_of_printer_columns() -> None:
    item = {
        "metadata": {"annotations": {"a.b/c": "x"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other"}]},
    }
    assert find_path(item, '.status.conditions[?(@.type=="Ready")].status') == "True"
    assert find_path(item, ".status.conditions[1].type") == "Other"
    assert find_path(item, r".metadata.annotations.a\.b/c".replace("/", r"\/")) == "x"
    assert find_path(item, ".status.absent.more") is None
    assert [age("2026-01-01T00:00:00Z", 1767225600 + s) for s in (5, 300, 90_000)] == [
        "5s",
        "5m",
        "25h",
    ]
