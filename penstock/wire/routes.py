"""Routes on the wire: which experts the routers of a mixture of experts chose, as raw little-endian ids.

A row is one position of a sequence: `experts_per_token` ids of each layer, in the order of the layers. A sequence of T
tokens has T - 1 rows, of all its positions but the last: what follows is drawn from a position's output, and nothing
follows the last. A completion's token therefore has the row of the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFieldError, require
from penstock.v1 import types_pb2
from penstock.wire.codec import Packed
from penstock.wire.pieces import MAX_GROUP_TOKENS, MAX_TOKEN_BYTES

Routes = npt.NDArray[np.unsignedinteger[Any]]
"""[rows, layers, experts_per_token], uint8 or uint16."""
MAX_LAYERS, MAX_EXPERTS = 1_024, 65_536
MAX_PROMPT_ROUTE_BYTES = 8 * 1024 * 1024
"""Rows of a prompt: they travel in one message with the first tokens."""
_UINT8, _UINT16 = np.dtype("u1"), np.dtype("<u2")


class RouteFacts(NamedTuple):
    """What can be said of routes before their form is known."""

    num_bytes: int = 0
    largest_uint8: int = 0
    """The largest id if each takes a byte."""
    largest_uint16: int = 0
    """The largest id if each takes two."""


NO_ROUTES = RouteFacts()


def read_facts(data: Packed) -> RouteFacts:
    """The facts of serialized routes, perhaps none."""
    if not data:
        return NO_ROUTES
    pairs = np.frombuffer(data[: len(data) // 2 * 2], _UINT16)
    return RouteFacts(len(data), int(np.frombuffer(data, _UINT8).max()), int(pairs.max(initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """The form of the routes of one model."""

    num_layers: int
    """Layers that have a router."""
    num_experts: int
    """Experts of each."""
    experts_per_token: int
    """Experts that each layer chooses for a token."""

    @classmethod
    def from_proto(cls, shape: types_pb2.RoutingShape, field: str) -> RoutingShape:
        """Check a message's shape. Raises InvalidFieldError."""
        layers, experts, chosen = shape.num_layers, shape.num_experts, shape.experts_per_token
        require(1 <= layers <= MAX_LAYERS, f"{field}.num_layers", layers, f"1 to {MAX_LAYERS}")
        require(2 <= experts <= MAX_EXPERTS, f"{field}.num_experts", experts, f"2 to {MAX_EXPERTS}")
        require(1 <= chosen <= experts, f"{field}.experts_per_token", chosen, f"1 to num_experts, {experts}")
        made = cls(num_layers=layers, num_experts=experts, experts_per_token=chosen)
        most = MAX_PROMPT_ROUTE_BYTES // 64
        require(made.row_bytes <= most, field, f"{made.row_bytes} bytes a token", f"at most {most}")
        return made

    def to_proto(self) -> types_pb2.RoutingShape:
        """The same as a message."""
        return types_pb2.RoutingShape(
            num_layers=self.num_layers, num_experts=self.num_experts, experts_per_token=self.experts_per_token
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer that holds an expert's id."""
        return _UINT8 if self.num_experts <= 256 else _UINT16

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.num_layers * self.experts_per_token * self.dtype.itemsize

    @property
    def max_group_tokens(self) -> int:
        """Tokens of a group's samples, their prompts included, so that it can be delivered (`penstock.wire.pieces`)."""
        return MAX_GROUP_TOKENS * MAX_TOKEN_BYTES // (MAX_TOKEN_BYTES + self.row_bytes)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt whose rows fit a message."""
        return MAX_PROMPT_ROUTE_BYTES // self.row_bytes

    def fault(self, facts: RouteFacts, num_rows: int) -> str:
        """Why these are not the routes of `num_rows` positions; empty if they are."""
        expected = num_rows * self.row_bytes
        if facts.num_bytes != expected:
            return f"routes: {facts.num_bytes} bytes; {num_rows} rows of {self.row_bytes} bytes are {expected}"
        largest = facts.largest_uint8 if self.dtype == _UINT8 else facts.largest_uint16
        return f"routes: expert {largest}; ids are below {self.num_experts}" if largest >= self.num_experts else ""

    def array(self, data: bytes, *, num_rows: int, field: str) -> Routes:
        """The routes in `data`, [num_rows, layers, experts_per_token]. Raises InvalidFieldError."""
        fault = self.fault(read_facts(data), num_rows)
        if fault:
            raise InvalidFieldError(f"{field}: {fault}", field=field)
        array: Routes = np.frombuffer(data, self.dtype).reshape(num_rows, self.num_layers, self.experts_per_token)
        return array

    def empty(self) -> Routes:
        """No rows."""
        return np.empty((0, self.num_layers, self.experts_per_token), self.dtype)


def num_route_rows(*, num_tokens: int, num_prompt_tokens: int, offset: int = 0) -> int:
    """Rows that come with completion tokens after `offset` others: with the first ones those of the prompt, too."""
    return num_tokens + (num_prompt_tokens - 1 if num_tokens and not offset else 0)


def routes_fault(shape: RoutingShape | None, facts: RouteFacts, num_rows: int) -> str:
    """Why a sample must not come with these routes; empty if it may. `shape` is None where it must come without."""
    if shape is None:
        return f"routes: {facts.num_bytes} bytes; this sample comes without" if facts.num_bytes else ""
    return shape.fault(facts, num_rows)
