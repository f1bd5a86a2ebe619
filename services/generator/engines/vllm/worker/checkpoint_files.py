"""Reads the tensors of a checkpoint's files by the names under which vLLM's modules hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from services.generator.engine.stacked_experts import ExpertPart, expert_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, or one expert's part of a stacked one."""

    file: Any
    """Open safetensors file."""
    origin: str
    """Name of the tensor in the file."""
    part: ExpertPart | None = None

    def read(self) -> torch.Tensor:
        """Its values, read now."""
        if self.part is None:
            tensor: torch.Tensor = self.file.get_tensor(self.origin)
            return tensor
        part = self.part
        # One index after the other: of a slice over two dimensions all experts would be read.
        expert: torch.Tensor = self.file.get_slice(self.origin)[part.expert : part.expert + 1]
        return expert[0, part.first_row : part.first_row + part.shape[0]]


@contextlib.contextmanager
def open_checkpoint(paths: Sequence[str]) -> Iterator[dict[str, StoredTensor]]:
    """Tensors by name, experts one by one; read on demand, while the files are open."""
    with contextlib.ExitStack() as stack:
        stored: dict[str, StoredTensor] = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                parts = tuple(expert_parts(name, file.get_slice(name).get_shape()))
                stored |= {part.name: StoredTensor(file=file, origin=name, part=part) for part in parts}
                if not parts:
                    stored[name] = StoredTensor(file=file, origin=name)
        yield stored


def origins_of(names: set[str], checkpoint: Mapping[str, StoredTensor]) -> set[str]:
    """Names of the files' tensors that contain any of these; names that are in no file stay."""
    return {checkpoint[name].origin if name in checkpoint else name for name in names}


def complete_origins(names: set[str], checkpoint: Mapping[str, StoredTensor]) -> set[str]:
    """Names of the files' tensors all of whose parts are among these."""
    lacking = {stored.origin for name, stored in checkpoint.items() if name not in names}
    return origins_of(names, checkpoint) - lacking
