"""Frames groups into microbatches of about 1 MiB each, in the order in which they are added. Pure.

They are serialized here: put into a message, packed groups would be copied three times on their way to the socket.
"""

from __future__ import annotations

import secrets

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import Packed, field_prefix
from services.broker.assembly.messages import MAX_FRAME_BYTES

_MICROBATCH = broker_pb2.StreamMicrobatchesResponse.MICROBATCH_FIELD_NUMBER
_PACKED_GROUPS = broker_pb2.Microbatch.PACKED_GROUPS_FIELD_NUMBER


class Frames:
    """Collects groups, parsed or packed; a larger group gets its own microbatch."""

    def __init__(self, policy_version: int) -> None:
        self._policy_version = policy_version
        self._groups: list[types_pb2.TrajectoryGroup] = []
        self._packed: list[Packed] = []
        self._size_bytes = 0
        self._responses: list[bytes] = []

    def take(self) -> list[bytes]:
        """The groups added since the last call as serialized StreamMicrobatchesResponses; closes the last one."""
        self.close()
        responses, self._responses = self._responses, []
        return responses

    def add_group(self, group: types_pb2.TrajectoryGroup) -> None:
        """Add a group as a message."""
        self._make_room(group.ByteSize())
        self._groups.append(group)

    def add_packed(self, packed: Packed) -> None:
        """Add groups as a serialized TrajectoryGroups; empty bytes add none."""
        if packed:
            self._make_room(len(packed))
            self._packed.append(packed)

    def add_piece(self, piece: types_pb2.GroupPiece) -> None:
        """Add a part of a group, in a microbatch of its own."""
        self.close()
        microbatch = self._microbatch()
        microbatch.piece.CopyFrom(piece)
        self._responses.append(broker_pb2.StreamMicrobatchesResponse(microbatch=microbatch).SerializeToString())

    def _make_room(self, size_bytes: int) -> None:
        if self._size_bytes and self._size_bytes + size_bytes > MAX_FRAME_BYTES:
            self.close()
        self._size_bytes += size_bytes

    def close(self) -> None:
        """End a microbatch: the next addition begins another."""
        if not self._size_bytes:
            return
        microbatch = self._microbatch()
        microbatch.groups.extend(self._groups)
        head, size_bytes = microbatch.SerializeToString(), sum(map(len, self._packed))
        if size_bytes:
            head += field_prefix(_PACKED_GROUPS, size_bytes)
        # Concatenated serialized lists are the serialized list of both.
        self._responses.append(b"".join((field_prefix(_MICROBATCH, len(head) + size_bytes), head, *self._packed)))
        self._groups, self._packed, self._size_bytes = [], [], 0

    def _microbatch(self) -> broker_pb2.Microbatch:
        return broker_pb2.Microbatch(
            microbatch_id=f"{self._policy_version}-{secrets.token_hex(6)}", policy_version=self._policy_version
        )
