"""The element types of a model in training.

Weights and AdamW's moments are float32 always: in bfloat16, with 8 bits of mantissa, an update below about 1/256 of a
weight is lost. `model.dtype` chooses the type of the matrix products (PyTorch's autocast) and of published and exported
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

MASTER = torch.float32
_HALVES = (torch.bfloat16, torch.float16)


def compute_dtype(name: Literal["auto", "float32", "bfloat16"], *, path: Path, device: torch.device) -> torch.dtype:
    """The type of a run's matrix products and published weights.

    Args:
        name: `model.dtype`; auto is bfloat16 for a model of 16 bits on a GPU, else float32.
        path: The model's directory.
        device: Where it is trained.

    Raises:
        OSError: The directory does not hold a model.
    """
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    if device.type == "cpu":
        return torch.float32
    own = AutoConfig.from_pretrained(path, local_files_only=True).dtype
    return torch.bfloat16 if own in _HALVES else torch.float32


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Forward passes in the context compute in `dtype`; backward passes follow automatically."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
