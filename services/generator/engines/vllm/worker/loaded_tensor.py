"""What a vLLM worker read back of its model: values, and the checkpoint's tensor that they must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedTensor:
    """Values that the model decodes with, and the part of a checkpoint tensor that they must equal."""

    name: str
    """Name in the Hugging Face state dict."""
    tied_name: str | None = None
    """The tensor that replaces it if the checkpoint omits it as tied."""
    first_row: int = 0
    """First of its rows in the checkpoint's tensor."""
    columns: torch.Tensor | None = None
    """Its columns of the checkpoint's tensor; all when unset."""
    values: torch.Tensor
    """[rows] or [rows, columns]."""

    def matches(self, expected: torch.Tensor) -> bool:
        """Whether the values equal their part of the checkpoint's tensor, cast to their type."""
        part = expected.narrow(0, self.first_row, self.values.shape[0]) if expected.dim() else expected
        if self.columns is not None:
            part = part[:, self.columns]
        return bool(torch.equal(part.to(device=self.values.device, dtype=self.values.dtype), self.values))
