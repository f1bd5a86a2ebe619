"""Reads messages together with the packed groups in them.

Some messages carry groups as one piece of bytes, a serialized TrajectoryGroups, which the broker hands on unparsed. On
the wire that is no different from the message itself. So the types here read both at once, without the two copies of
all bytes that it takes to read one out of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from penstock.v1 import broker_pb2, types_pb2

_PACKAGE = "penstock.wire.packed"


def _variant(message: type[Message], types: Mapping[str, type[Message]]) -> type[Message]:
    """A type that reads what `message` reads, but reads some fields, by name, as messages of other types."""
    source = message.DESCRIPTOR
    files = {file.name for file in (source.file, *source.file.dependencies)}
    files |= {kind.DESCRIPTOR.file.name for kind in types.values()}
    made = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.{source.name}.proto", package=_PACKAGE, syntax="proto3", dependency=sorted(files)
    )
    copy = made.message_type.add()
    source.CopyToProto(copy)
    for field in copy.field:
        if field.name in types:
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
            field.type_name = f".{types[field.name].DESCRIPTOR.full_name}"
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(made.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{source.name}"))


# Typed as Any: no stubs are generated for them. Each has the fields of the type that it is made of.
PutTrajectoriesRequest: Any = _variant(
    broker_pb2.PutTrajectoriesRequest,
    {"groups": types_pb2.TrajectoryGroups},
)
_Microbatch = _variant(broker_pb2.Microbatch, {"packed_groups": types_pb2.TrajectoryGroups})
StreamMicrobatchesResponse: Any = _variant(broker_pb2.StreamMicrobatchesResponse, {"microbatch": _Microbatch})
