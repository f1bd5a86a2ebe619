"""Settings of a critic process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.config import LocalPath, MeasuredConfig, RunId
from penstock.storage.addresses import StoredPath


class CriticConfig(MeasuredConfig):
    """A critic: computes and trains the values of one run, whose trainer calls it."""

    listen: str = "127.0.0.1:7309"
    """Address of its CriticService, host:port."""
    run_id: RunId
    """The run whose critic it is."""
    model_path: StoredPath
    """Hugging Face directory of the run's model, as a copy of which the critic begins."""
    state_dir: LocalPath
    """Folder of its checkpoints and of the steps since; one for each run, on a disk that outlives the process."""
    checkpoint_every_steps: int = Field(default=20, ge=1)
    """Steps between its checkpoints; those since the last are taken again after a restart, without the policy."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of its matrix products; auto is bfloat16 on GPUs for a model of 16 bits, else float32. Its weights
    are float32 in any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto takes CUDA if available. The whole critic, with its optimiser, is on this one device."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of PyTorch."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""
