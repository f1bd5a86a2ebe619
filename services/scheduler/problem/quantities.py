"""Types of the quantities that a planning problem states, with their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_NUMBER = 1e15
"""Upper bound of any quantity; keeps the arithmetic finite."""

Positive = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


def with_default(value: float | dict[str, float]) -> float | dict[str, float]:
    """The value, if one for each GPU type has a `default`; ValueError otherwise."""
    if isinstance(value, dict) and "default" not in value:
        raise ValueError("needs the key 'default' for GPU types that are not listed")
    return value
