"""Bodies in Kubernetes' protobuf form, of the few kinds that clients written in Go post that way.

Only reading: every client that sends protobuf takes JSON as an answer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.fakekube.errors import ApiError

_MAGIC = b"k8s\x00"
_LENGTHS = {1: 8, 5: 4}  # bytes of a field, by wire type

Read = Callable[[Any], Any]
# By number: the name, how a value is read, and whether it is one, a list ([]) or a map ({}).
Message = Mapping[int, tuple[str, Read, str]]


def _text(value: bytes) -> str:
    return value.decode()


def _data(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _time(value: bytes) -> None:
    return None  # the server's own business


def _nested(message: Message) -> Read:
    return lambda value: _read(value, message)


_OWNER: Message = {
    1: ("kind", _text, ""),
    3: ("name", _text, ""),
    4: ("uid", _text, ""),
    5: ("apiVersion", _text, ""),
    6: ("controller", bool, ""),
    7: ("blockOwnerDeletion", bool, ""),
}
_META: Message = {
    1: ("name", _text, ""),
    2: ("generateName", _text, ""),
    3: ("namespace", _text, ""),
    5: ("uid", _text, ""),
    6: ("resourceVersion", _text, ""),
    8: ("creationTimestamp", _time, ""),
    11: ("labels", _text, "{}"),
    12: ("annotations", _text, "{}"),
    13: ("ownerReferences", _nested(_OWNER), "[]"),
    14: ("finalizers", _text, "[]"),
}
_PRECONDITIONS: Message = {1: ("uid", _text, ""), 2: ("resourceVersion", _text, "")}
_SECRET: Message = {
    1: ("metadata", _nested(_META), ""),
    2: ("data", _data, "{}"),
    3: ("type", _text, ""),
    4: ("stringData", _text, "{}"),
    5: ("immutable", bool, ""),
}
_CONFIG_MAP: Message = {
    1: ("metadata", _nested(_META), ""),
    2: ("data", _text, "{}"),
    3: ("binaryData", _data, "{}"),
    4: ("immutable", bool, ""),
}
_NAMESPACE: Message = {1: ("metadata", _nested(_META), "")}
_DELETE_OPTIONS: Message = {
    1: ("gracePeriodSeconds", int, ""),
    2: ("preconditions", _nested(_PRECONDITIONS), ""),
    3: ("orphanDependents", bool, ""),
    4: ("propagationPolicy", _text, ""),
    5: ("dryRun", _text, "[]"),
}
_ATTRIBUTES: Message = {
    1: ("namespace", _text, ""),
    2: ("verb", _text, ""),
    3: ("group", _text, ""),
    5: ("resource", _text, ""),
    6: ("subresource", _text, ""),
    7: ("name", _text, ""),
}
_REVIEW_SPEC: Message = {1: ("resourceAttributes", _nested(_ATTRIBUTES), "")}
_REVIEW: Message = {2: ("spec", _nested(_REVIEW_SPEC), "")}
_KINDS: Mapping[str, Message] = {
    "Secret": _SECRET,
    "ConfigMap": _CONFIG_MAP,
    "Namespace": _NAMESPACE,
    "DeleteOptions": _DELETE_OPTIONS,
    "SelfSubjectAccessReview": _REVIEW,
}
_TYPE: Message = {1: ("apiVersion", _text, ""), 2: ("kind", _text, "")}
_UNKNOWN: Message = {1: ("type", _nested(_TYPE), ""), 2: ("raw", bytes, "")}


def read_protobuf(body: bytes) -> dict[str, Any]:
    """Return the object as JSON has it; raises ApiError."""
    if not body.startswith(_MAGIC):
        raise ApiError(400, "the body is not in Kubernetes' protobuf form")
    outer = _read(body[len(_MAGIC) :], _UNKNOWN)
    sort = outer.get("type", {})
    message = _KINDS.get(sort.get("kind", ""))
    if message is None:
        raise ApiError(415, f"this stand-in reads no protobuf of the kind {sort.get('kind')}")
    return {**sort, **_read(outer.get("raw", b""), message)}


def _read(body: bytes, message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(body):
        if number not in message:
            continue  # like every reader of protobuf
        name, read, many = message[number]
        if many == "[]":
            found.setdefault(name, []).append(read(value))
        elif many == "{}":
            pair = dict(_fields(value))
            found.setdefault(name, {})[pair.get(1, b"").decode()] = read(pair.get(2, b""))
        elif (item := read(value)) not in (None, ""):  # Go's writers spell out what is empty
            found[name] = item
    return found


def _fields(body: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(body, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(body, at)
        elif wire in _LENGTHS:
            size = _LENGTHS[wire]
        else:
            raise ApiError(400, f"wire type {wire} of protobuf")
        if at + size > len(body):
            raise ApiError(400, "the body ends in the middle of a field")
        yield number, body[at : at + size]
        at += size


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(body):
            raise ApiError(400, "the body ends in the middle of a number")
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
