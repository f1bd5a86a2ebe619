"""The models beside the policy: a critic with its optimiser, and a reference; and what a checkpoint holds of them.

    companions/model.safetensors    critic/weights/NAME  critic/optimizer/NAME/PART  reference/NAME

The reference is saved once it was refreshed: until then it is the initial model, which every process loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.model.backend import CheckpointMismatchError
from services.trainer.model.critic import Critic
from services.trainer.model.ranks import Ranks
from services.trainer.model.tensor_names import below, check_layout, placed
from services.trainer.model.trained_model import TrainedModel

FOLDER = "companions"
_FILE = "model.safetensors"


class AuxiliaryModels:
    """Those of one policy.

    Args:
        critic: The critic, or None.
        trained: The policy, which keeps the reference.
        ranks: The processes over which all of them are sharded.
    """

    def __init__(self, *, critic: Critic | None, trained: TrainedModel, ranks: Ranks) -> None:
        self.critic = critic
        self._trained = trained
        self._ranks = ranks
        self._is_reference_refreshed = False

    def refresh_reference(self) -> None:
        """The policy's present weights become the reference. Raises UnsupportedModelError."""
        self._trained.refresh_reference()
        self._is_reference_refreshed = True

    def tensors(self) -> dict[str, Tensor]:
        """The saved tensors by name; live views, or gathered as `Ranks.whole` does."""
        critic = {} if self.critic is None else self.critic.saved_tensors()
        reference = self._trained.reference_tensors() if self._is_reference_refreshed else {}
        tensors = placed(critic, "critic") | placed(reference, "reference")
        return {name: self._ranks.whole(tensor) for name, tensor in tensors.items()}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Raises CheckpointMismatchError where `saved` is not of such models."""
        if self.critic is not None:
            self.critic.check_saved(below(saved, "critic"))
        reference = below(saved, "reference")
        if reference:
            check_layout(reference, self._trained.reference_tensors(), where="the checkpoint's reference")

    def take(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from what `check` has seen."""
        if self.critic is not None:
            self.critic.load_tensors(below(saved, "critic"))
        reference = below(saved, "reference")
        for name, tensor in self._trained.reference_tensors().items():
            if reference:
                tensor.copy_(self._ranks.part(reference[name], tensor))
        self._is_reference_refreshed = bool(reference)


def write_auxiliary_models(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes them, if any, below a checkpoint's directory. Raises OSError."""
    if not tensors:
        return
    (directory / FOLDER).mkdir()
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FOLDER / _FILE)
    except SafetensorError as error:
        raise OSError(f"{directory}: {error}") from error


def read_auxiliary_models(directory: Path) -> dict[str, Tensor]:
    """The tensors that `write_auxiliary_models` wrote; empty if none. Raises CheckpointMismatchError."""
    path = directory / FOLDER / _FILE
    if not path.is_file():
        return {}
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise CheckpointMismatchError(f"{path}: cannot be read: {error}") from error
    return tensors
