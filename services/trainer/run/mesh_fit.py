"""Refuses a mesh into which a model does not fit before a process starts, by its config.json."""

from __future__ import annotations

from transformers import AutoConfig

from services.trainer.config import TrainingConfig
from services.trainer.distributed.expert_mesh import check_experts
from services.trainer.distributed.split_layers import check_split
from services.trainer.distributed.stages import stages_of


def check_mesh(config: TrainingConfig) -> None:
    """Return if the model can be cut, split and divided as the run asks.

    What only its modules or tensors show is refused as they are loaded, by all processes alike.

    Raises:
        UnsupportedModelError: It cannot, with the field, its value and what to do.
        OSError: The directory does not hold a model.
    """
    parallel = config.trainer.parallel
    if max(parallel.tensor, parallel.expert, parallel.pipeline) == 1:
        return
    try:
        found = AutoConfig.from_pretrained(config.model.folder, local_files_only=True)
    except ValueError:
        # Said as it is loaded.
        return
    if parallel.tensor > 1:
        check_split(found, parallel.tensor)
    if parallel.expert > 1:
        check_experts(found, parallel.expert)
    if parallel.pipeline > 1:
        stages_of(found, num_stages=parallel.pipeline, layers_per_stage=parallel.layers_per_stage)
