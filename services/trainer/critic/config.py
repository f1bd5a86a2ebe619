"""Settings of a critic process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config import LocalPath, MeasuredConfig, RunId
from penstock.storage.addresses import Address, StoredAddress, StoredPath, below
from services.trainer.config import TrainingConfig


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
    checkpoint_storage: StoredAddress | None = None
    """The run's `run.checkpoint_storage`: checkpoints and steps are then there, so that the critic goes on from there
    on any machine, and `state_dir` is scratch."""
    checkpoint_every_steps: int = Field(default=20, ge=1)
    """Steps between its checkpoints; those since the last are taken again after a restart, without the policy."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of its matrix products; auto is bfloat16 on GPUs for a model of 16 bits, else float32. Its weights
    are float32 in any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto takes CUDA if available."""
    processes: int = Field(default=1, ge=1, le=64)
    """Processes over which critic and optimiser are sharded (FSDP2), one per GPU, on this machine."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of PyTorch."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""

    @property
    def stored(self) -> Address | None:
        """Its own folder in object storage, beside the checkpoints of its trainer."""
        return None if self.checkpoint_storage is None else below(self.checkpoint_storage, f"{self.run_id}/critic")


class CriticProcesses(TrainingConfig):
    """What the processes of a critic are made from: a trainer's settings, as far as a critic has them."""

    is_critic: Literal[True]
    """Tells it from that of a trainer."""


def processes_of(config: CriticConfig, folder: Path) -> CriticProcesses:
    """The settings of the processes of a critic whose model is in `folder`."""
    compute = ("device", "num_threads", "processes", "gradient_checkpointing")
    return CriticProcesses.model_validate(
        {
            "is_critic": True,
            "model": {"path": str(folder), "dtype": config.dtype},
            "data": {"train": None},
            "trainer": {name: getattr(config, name) for name in compute},
        }
    )
