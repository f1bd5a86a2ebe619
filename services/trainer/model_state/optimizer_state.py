"""Collects the tensors that resume training in one flat dictionary: weights, AdamW's moments, random state, step count.

    weights/NAME   optimizer/NAME/{step,exp_avg,exp_avg_sq}   random/{cpu,cuda}/RANK   num_optimizer_steps
    critic/weights/NAME   critic/optimizer/NAME/...           reference/NAME

The reference is included once it was refreshed: until then it is the initial model, which every process loads.
`restore` reads everything before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.trainer.model.backend import CheckpointMismatchError
from services.trainer.model.learner import Learner
from services.trainer.model_state.dcp import check_resume, read_resume, stated_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_STEP_COUNT = "num_optimizer_steps"
"""Batches trained on; the name dates from when each was one optimiser step."""
_WEIGHTS, _RANDOM, _CRITIC, _REFERENCE = "weights/", "random/", "critic/", "reference/"


class TrainingState:
    """The live tensors of a process; sharded ones are DTensors.

    Args:
        weights: What is trained and published, by name, buffers included.
        policy: Trains them.
        critic: Trains the critic, all of whose weights are its parameters; None without one.
        reference: The reference's weights by name; empty if they cannot change.
        rank: Of this process among those that train together.
        elsewhere: Names of tensors, the critic's too, that only other stages hold.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, Tensor],
        policy: Learner,
        critic: Learner | None,
        reference: Mapping[str, Tensor],
        rank: int,
        elsewhere: Iterable[str] = (),
    ) -> None:
        self._elsewhere = frozenset(elsewhere)
        self._learners = {"": policy}
        self._weights = {f"{_WEIGHTS}{name}": tensor for name, tensor in weights.items()}
        self._ignored: tuple[str, ...] = (_RANDOM, _CRITIC)
        if critic is not None:
            self._learners[_CRITIC] = critic
            self._weights |= {f"{_CRITIC}{_WEIGHTS}{name}": each.detach() for name, each in critic.parameters.items()}
            self._ignored = (_RANDOM,)
        self._reference = {f"{_REFERENCE}{name}": tensor for name, tensor in reference.items()}
        self._rank = rank
        self.has_new_reference = False
        """Whether the reference was refreshed."""

    def collect(self, *, num_batches: int) -> dict[str, Tensor]:
        """Live views by name."""
        tensors = self._weights | (self._reference if self.has_new_reference else {}) | self._random_states()
        for prefix, learner in self._learners.items():
            for name, parameter in learner.parameters.items():
                for part, tensor in learner.optimizer.state[parameter].items():
                    tensors[f"{prefix}optimizer/{name}/{part}"] = tensor
        return tensors | {_STEP_COUNT: torch.tensor(num_batches, dtype=torch.int64)}

    @staticmethod
    def weights_in(collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is trained and published of what was collected, by its own names."""
        return {name.removeprefix(_WEIGHTS): tensor for name, tensor in collected.items() if name.startswith(_WEIGHTS)}

    def restore(
        self,
        directory: Path,
        *,
        group: ProcessGroup | None = None,
        agree: Callable[[bool], bool] = lambda is_so: is_so,
    ) -> int:
        """Continues from what was written of `collect`, by any number of processes; returns the optimiser steps taken.

        A process without a counterpart keeps its own random state. A saved critic is ignored if there is none now.

        Args:
            directory: The checkpoint.
            group: The processes that read together; None for a single one.
            agree: Whether something is so in all of them.

        Raises:
            CheckpointMismatchError: It belongs to another model, is incomplete or damaged; nothing was changed.
        """
        problem, plan = None, None
        try:
            plan = self._plan(directory)
        except CheckpointMismatchError as error:
            problem = error
        # Stages hold different tensors, and those that find nothing wrong would wait for the others.
        if not agree(problem is None) or plan is None:
            raise problem or CheckpointMismatchError(f"{directory}: does not fit the part of another process")
        live, moments, wanted, has_new_reference = plan
        read_resume(wanted, directory, group=group)
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(wanted[name])
        for prefix, learner in self._learners.items():
            for name, parameter in learner.parameters.items():
                learner.optimizer.state[parameter] = moments[prefix].get(name, {})
        self._set_random_states(wanted)
        self.has_new_reference = has_new_reference
        return int(wanted[_STEP_COUNT])

    def _plan(
        self, directory: Path
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, dict[str, Tensor]]], dict[str, Tensor], bool]:
        """What will change, the moments to be filled, all that is to be read, and whether a reference is in it."""
        stated = stated_tensors(directory)
        has_new_reference = any(name.startswith(_REFERENCE) for name in stated)
        live = self._weights | (self._reference if has_new_reference else {})
        moments = {prefix: self._blank_moments(prefix, stated) for prefix in self._learners}
        wanted = {name: torch.empty_like(tensor) for name, tensor in live.items()}
        for prefix, blank in moments.items():
            for name, parts in blank.items():
                wanted |= {f"{prefix}optimizer/{name}/{part}": tensor for part, tensor in parts.items()}
        wanted[_STEP_COUNT] = torch.tensor(0, dtype=torch.int64)
        wanted |= {name: tensor for name, tensor in self._random_states().items() if name in stated}
        unknown = sorted(
            name
            for name in stated.keys() - wanted.keys()
            if not name.startswith(self._ignored) and not self._is_elsewhere(name)
        )
        if unknown:
            raise CheckpointMismatchError(f"{directory}: holds {unknown[0]}, which the model does not have")
        check_resume(wanted, directory)
        return live, moments, wanted, has_new_reference

    def _is_elsewhere(self, name: str) -> bool:
        """Whether it belongs to a tensor of another stage: PREFIX/NAME or optimizer/NAME/PART, also of the critic."""
        _, _, rest = name.removeprefix(_CRITIC).partition("/")
        return rest in self._elsewhere or rest.rpartition("/")[0] in self._elsewhere

    def _blank_moments(self, prefix: str, stated: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """AdamW's state of each parameter, to be filled; empty if it was saved before its first step."""
        if not any(name.startswith(f"{prefix}optimizer/") for name in stated):
            return {}
        return {name: _blank_moments(parameter) for name, parameter in self._learners[prefix].parameters.items()}

    def _random_states(self) -> dict[str, Tensor]:
        states = {f"{_RANDOM}cpu/{self._rank}": torch.get_rng_state()}
        if any(parameter.is_cuda for parameter in self._learners[""].parameters.values()):
            states[f"{_RANDOM}cuda/{self._rank}"] = torch.cuda.get_rng_state()
        return states

    def _set_random_states(self, read: Mapping[str, Tensor]) -> None:
        for name in self._random_states().keys() & read.keys():
            if name.startswith(f"{_RANDOM}cuda"):
                torch.cuda.set_rng_state(read[name])
            else:
                torch.set_rng_state(read[name])


def _blank_moments(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter, to be filled."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }
