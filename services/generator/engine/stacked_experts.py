"""Names the experts of a mixture one by one, whether a file stacks them or not.

`transformers` holds a layer's experts in two tensors, `experts.gate_up_proj` [experts, 2 x width, hidden] and
`experts.down_proj` [experts, hidden, width]; model hubs store each expert's own `experts.0.gate_proj.weight`,
`experts.0.up_proj.weight` and `experts.0.down_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_STACKS: Mapping[str, tuple[str, ...]] = {
    ".experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".experts.down_proj": ("down_proj",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """One expert's tensor within a stacked one."""

    name: str
    """Its own name."""
    expert: int
    """Index in the first dimension."""
    first_row: int
    """First of its rows, in the second dimension."""
    shape: tuple[int, int]
    """Rows and columns."""


def expert_parts(name: str, shape: Sequence[int]) -> Iterable[ExpertPart]:
    """The experts' tensors that a tensor stacks; none if it stacks none."""
    ending = next((ending for ending in _STACKS if name.endswith(ending)), None)
    if ending is None or len(shape) != 3 or shape[1] % len(_STACKS[ending]):
        return ()
    prefix, parts = name.rpartition(".")[0], _STACKS[ending]
    num_rows = shape[1] // len(parts)
    return (
        ExpertPart(
            name=f"{prefix}.{expert}.{part}.weight",
            expert=expert,
            first_row=index * num_rows,
            shape=(num_rows, shape[2]),
        )
        for expert in range(shape[0])
        for index, part in enumerate(parts)
    )


def split_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, each expert's own in place of stacked ones."""
    split: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        parts = tuple(expert_parts(name, shape))
        split |= {part.name: part.shape for part in parts} if parts else {name: shape}
    return split
