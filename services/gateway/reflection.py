"""Server reflection, v1 and v1alpha: the same messages under two package names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
_METHOD = "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Serve reflection of `services` (full names) and of itself, under both versions."""
    names = (*services, V1, V1ALPHA)
    pool = _pool_of(names)
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    # Requests and replies of v1 and v1alpha are the same on the wire; clients probe v1 first.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1, V1ALPHA):
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {_METHOD: handler}),)
        )


def _pool_of(services: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """Copy the services' files into a pool of our own and add the v1 file to it.

    A pool of our own: the default one belongs to the whole process, and a second definition of
    grpc.reflection.v1 in it would clash with a package that brings the real one.
    """
    default = descriptor_pool.Default()
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    for name in services:
        if name != V1:
            _copy(default.FindFileContainingSymbol(name), pool, added)
    pool.AddSerializedFile(_v1_file().SerializeToString())
    return pool


def _copy(file: FileDescriptor, pool: descriptor_pool.DescriptorPool, added: set[str]) -> None:
    if file.name in added:
        return
    for dependency in file.dependencies:
        _copy(dependency, pool, added)
    pool.AddSerializedFile(file.serialized_pb)
    added.add(file.name)


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = "grpc.reflection.v1"
    file.ClearField("options")
    _rename_types(file)
    return file


def _rename_types(file: descriptor_pb2.FileDescriptorProto) -> None:
    def rename(item: Any, field: str) -> None:  # messages of descriptor.proto
        name = getattr(item, field)
        if name:  # a scalar field has none, and setting "" would make it look like a message
            setattr(item, field, name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1."))

    for message in file.message_type:
        for message_field in message.field:
            rename(message_field, "type_name")
    for service in file.service:
        for method in service.method:
            rename(method, "input_type")
            rename(method, "output_type")
