"""Collects the tensors that resume training in one flat dictionary: weights, AdamW's moments, random state, step count.

    weights/NAME   optimizer/NAME/{step,exp_avg,exp_avg_sq}   random/{cpu,cuda}/RANK   num_optimizer_steps

`restore` reads everything before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.trainer.model.backend import CheckpointMismatchError
from services.trainer.model_state.dcp import read_resume, stated_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_STEP_COUNT = "num_optimizer_steps"
"""Batches trained on; named when each was one optimiser step."""
_RANDOM = "random/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The live tensors of a process; sharded ones are DTensors."""

    weights: Mapping[str, Tensor]
    """What is trained and published, by name, buffers included."""
    parameters: Mapping[str, Tensor]
    """The tensors that the optimiser changes, by name."""
    optimizer: torch.optim.Optimizer
    """AdamW."""
    rank: int = 0
    """Rank of this process among those that train together."""

    def collect(self, *, num_batches: int) -> dict[str, Tensor]:
        """Live views by name."""
        tensors = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        for name, parameter in self.parameters.items():
            for part, tensor in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{name}/{part}"] = tensor
        tensors[_STEP_COUNT] = torch.tensor(num_batches, dtype=torch.int64)
        return tensors | self._random_states()

    def restore(self, directory: Path, *, group: ProcessGroup | None = None) -> int:
        """Continues from what was written of `collect`, by any number of processes; returns the optimiser steps taken.

        A process that had no counterpart keeps its own random state.

        Raises:
            CheckpointMismatchError: It is of another model, incomplete or damaged; nothing was changed.
        """
        stated = stated_tensors(directory)
        moments = {name: _blank_moments(parameter) for name, parameter in self.parameters.items()}
        if not any(name.startswith("optimizer/") for name in stated):
            # Saved before the first step: AdamW makes its moments when it takes one.
            moments = {}
        wanted = {f"weights/{name}": torch.empty_like(tensor) for name, tensor in self.weights.items()}
        for name, parts in moments.items():
            wanted |= {f"optimizer/{name}/{part}": tensor for part, tensor in parts.items()}
        wanted[_STEP_COUNT] = torch.tensor(0, dtype=torch.int64)
        wanted |= {name: tensor for name, tensor in self._random_states().items() if name in stated}
        unknown = sorted(name for name in stated.keys() - wanted.keys() if not name.startswith(_RANDOM))
        if unknown:
            raise CheckpointMismatchError(f"{directory}: holds {unknown[0]}, which the model does not have")
        read_resume(wanted, directory, group=group)
        self._take(wanted, moments)
        return int(wanted[_STEP_COUNT])

    def _take(self, read: Mapping[str, Tensor], moments: Mapping[str, dict[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(read[f"weights/{name}"])
        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = moments.get(name, {})
        for name in self._random_states().keys() & read.keys():
            if name.startswith(f"{_RANDOM}cuda"):
                torch.cuda.set_rng_state(read[name])
            else:
                torch.set_rng_state(read[name])

    def _random_states(self) -> dict[str, Tensor]:
        states = {f"{_RANDOM}cpu/{self.rank}": torch.get_rng_state()}
        if any(parameter.is_cuda for parameter in self.parameters.values()):
            states[f"{_RANDOM}cuda/{self.rank}"] = torch.cuda.get_rng_state()
        return states


def _blank_moments(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter, to be filled."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }
