"""Microbatches of about 1 MiB each, in the order in which their groups are added. Pure."""

from __future__ import annotations

import secrets

from penstock.v1 import broker_pb2, types_pb2
from services.broker.payload import MAX_FRAME_BYTES


class Frames:
    """Collects groups, parsed or packed; a larger group goes alone."""

    def __init__(self, policy_version: int) -> None:
        self._policy_version = policy_version
        self._groups: list[types_pb2.TrajectoryGroup] = []
        self._packed: list[bytes] = []
        self._size_bytes = 0
        self._responses: list[broker_pb2.StreamMicrobatchesResponse] = []

    @property
    def responses(self) -> list[broker_pb2.StreamMicrobatchesResponse]:
        """Everything added so far; the last frame is closed."""
        self.close()
        return self._responses

    def add_group(self, group: types_pb2.TrajectoryGroup) -> None:
        """A group as a message."""
        self._make_room(group.ByteSize())
        self._groups.append(group)

    def add_packed(self, packed: bytes) -> None:
        """Groups as a serialized TrajectoryGroups; empty bytes are none."""
        if packed:
            self._make_room(len(packed))
            self._packed.append(packed)

    def _make_room(self, size_bytes: int) -> None:
        if self._size_bytes and self._size_bytes + size_bytes > MAX_FRAME_BYTES:
            self.close()
        self._size_bytes += size_bytes

    def close(self) -> None:
        """End a microbatch: what is added next begins another."""
        if not self._size_bytes:
            return
        response = broker_pb2.StreamMicrobatchesResponse()
        # Filled in place: a message given to another one's constructor is copied, and this one is large.
        microbatch = response.microbatch
        microbatch.microbatch_id = f"{self._policy_version}-{secrets.token_hex(6)}"
        microbatch.policy_version = self._policy_version
        microbatch.groups.extend(self._groups)
        # One serialized list after the other is the serialized list of both.
        microbatch.packed_groups = self._packed[0] if len(self._packed) == 1 else b"".join(self._packed)
        self._responses.append(response)
        self._groups, self._packed, self._size_bytes = [], [], 0
