"""How a backend's part in one process works with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from penstock.model.adapter_layout import model_digest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel


class Ranks:
    """The processes that train together: here one alone.

    All call `shard`, `model_digest`, `whole`, `total`, `added_up`, `smallest` and `agree` in one order: each waits for
    the others.
    """

    rank = 0
    """Of this process; 0 leads."""
    num_ranks = 1
    """Processes, this one included."""
    num_shards = 1
    """Processes over which one copy of the model, or of a stage of it, is sharded."""
    num_splits = 1
    """Processes that split each layer between them, and compute the same tokens."""
    num_expert_shards = 1
    """Processes that divide the experts of each layer between them, each with tokens of its own."""
    num_stages = 1
    """Stages of layers into which the model is cut."""
    stage_index = 0
    """Of this process' stage, from that of the embedding on."""
    offloads = False
    """Whether what `shard` leaves in a process rests in the machine's memory, not on its device."""
    elsewhere: Mapping[str, Tensor] = {}
    """Of a stage the model's other tensors, by name, without memory; known once a model was cut."""
    copies: frozenset[str] = frozenset()
    """Tensors that another stage holds, too, and that count there."""
    scorers: Sequence[int] = (0,)
    """Ranks of the processes that report results, one for each pack."""
    checkpoint_group: ProcessGroup | None = None
    """For checkpoints, which are written in the background; None for one process."""
    publish_group: ProcessGroup | None = None
    """For published weights, which are written in the background, too."""
    beside: frozenset[int] | None = None
    """Processes that see the run's folder where the first one does; None if all do."""

    def device(self, name: Literal["auto", "cpu", "cuda"]) -> torch.device:
        """Device of this process: the one named; for auto a GPU if there is one."""
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(name)

    def cut(self, model: PreTrainedModel, layers_per_stage: Sequence[int] | None, *, has_output: bool = True) -> None:
        """Leave the model this process' part of its layers; raises UnsupportedModelError if it cannot be divided so.

        Args:
            model: One of the run's.
            layers_per_stage: Of the stages into which it is cut; None for even ones.
            has_output: False if its output layer is not used; stages leave it out.
        """

    def split_adapter(self, model: PreTrainedModel) -> None:
        """Leave the factors of an adapter, added to a model that was cut, this process' part of them."""

    def shard(self, network: nn.Module, *, computing: torch.dtype) -> None:
        """Leave each process a part of every parameter; gradients are then summed over processes, in float32.

        Args:
            network: The module to call.
            computing: Element type of its matrix products, in which weights of float32 are gathered.
        """

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor in process 0, on the CPU if it had to be gathered; unspecified in the others."""
        return tensor

    def model_digest(self, directory: Path) -> str:
        """Of the weights in a model's folder, each of which one of the processes reads; raises OSError."""
        return model_digest(directory)

    def is_copy(self, tensor: Tensor) -> bool:
        """Whether another process writes all that this one holds of a tensor."""
        return False

    def sum_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Leave accumulated gradients, by name, the sum over all processes that do not add them up in each pass."""

    def total(self, tensor: Tensor) -> Tensor:
        """A number about sharded tensors, added up in every process."""
        return tensor

    def whole_norm(self, norm: float) -> float:
        """The L2 norm of all stages' gradients, the same number in every process."""
        return norm

    def added_up(self, count: int) -> int:
        """The sum of the processes' counts."""
        return count

    def smallest(self, number: int) -> int:
        """The smallest of the processes' numbers."""
        return number

    def agree(self, is_so: bool) -> bool:
        """Whether it is so in every process."""
        return is_so
