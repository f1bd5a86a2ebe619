"""Cuts a model into stages: runs of its layers, each held by other processes.

Modules of other stages are replaced by `Elsewhere`, so that names, and the call of the model, stay what they are: the
first stage is called with tokens, the others with the hidden states of the one before; the last one answers with
logits, the others with hidden states in their place. Tied embeddings are in the first stage and in the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.trained_model import distinct_tensors

FAMILIES = frozenset(("llama", "olmoe", "qwen2", "qwen3", "qwen3_moe"))
"""Model types whose modules have the names that `Stage.cut` expects, and which are tested."""


class Elsewhere(nn.Module):  # type: ignore[misc]  # torch declares no types for it
    """In the place of a module that another stage holds: passes its input on."""

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        """The input."""
        return hidden


class _Output(Elsewhere):
    """In the place of the output layer: FSDP wants no view as a model's result."""

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        """A copy of the input."""
        return hidden.clone()


def stages_of(config: PretrainedConfig, *, num_stages: int, layers_per_stage: Sequence[int] | None) -> list[range]:
    """The layers of each stage of a model; raises UnsupportedModelError if it cannot be cut so."""
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"trainer.parallel.pipeline: {config.model_type} cannot be cut into stages, only "
            f"{', '.join(sorted(FAMILIES))}; leave it 1"
        )
    return divided(
        config.num_hidden_layers,
        num_stages=num_stages,
        layers_per_stage=layers_per_stage,
        model=config.name_or_path or config.model_type,
    )


def divided(num_layers: int, *, num_stages: int, layers_per_stage: Sequence[int] | None, model: object) -> list[range]:
    """The layers of each stage, as even as possible unless their numbers are given; earlier stages have the larger.

    Raises:
        UnsupportedModelError: The model has another number of layers, or fewer than stages.
    """
    if num_layers < num_stages:
        raise UnsupportedModelError(
            f"trainer.parallel.pipeline: {num_stages} stages need as many layers, and {model} has {num_layers}; "
            "lower it"
        )
    sizes = layers_per_stage or [(num_layers + num_stages - 1 - stage) // num_stages for stage in range(num_stages)]
    if sum(sizes) != num_layers:
        raise UnsupportedModelError(
            f"trainer.parallel.layers_per_stage: {list(sizes)} are {sum(sizes)} layers, and {model} has {num_layers}; "
            "change them, or leave them out"
        )
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@dataclass(slots=True, kw_only=True)
class Stage:
    """One stage of the models of a run, which are cut alike."""

    index: int
    num_stages: int
    elsewhere: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of the whole model that this stage lacks, by name, without memory; known once a model was cut."""
    shared: frozenset[str] = frozenset()
    """Tensors of this stage that the other end of the pipeline holds, too."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer."""
        return self.index == self.num_stages - 1

    def cut(self, model: PreTrainedModel, layers_per_stage: Sequence[int] | None, *, has_output: bool = True) -> None:
        """Leave the model the modules of this stage, in place, before or after its weights are read.

        Args:
            model: One of the run's.
            layers_per_stage: None for even stages.
            has_output: False leaves the output layer out in all stages.

        Raises:
            UnsupportedModelError: It is of another family, or cannot be divided so.
        """
        ranges = stages_of(model.config, num_stages=self.num_stages, layers_per_stage=layers_per_stage)
        whole = distinct_tensors(model)
        is_tied = has_output and model.lm_head.weight is model.model.embed_tokens.weight
        self._replace(model, ranges[self.index], is_tied=is_tied, has_output=has_output and self.is_last)
        if not has_output:
            return
        held = distinct_tensors(model)
        self.elsewhere = {name: tensor.to("meta") for name, tensor in whole.items() if name not in held}
        if is_tied and (self.is_first or self.is_last):
            self.shared = frozenset(("model.embed_tokens.weight",))

    def _replace(self, model: Any, layers: range, *, is_tied: bool, has_output: bool) -> None:
        for index in range(len(model.model.layers)):
            if index not in layers:
                model.model.layers[index] = Elsewhere()
        if not self.is_first and not (self.is_last and is_tied):
            model.model.embed_tokens = Elsewhere()
        if not self.is_last:
            model.model.norm = Elsewhere()
        if not has_output:
            model.lm_head = _Output()
        # The files hold those of the other stages, too.
        model._keys_to_ignore_on_load_unexpected = {".*"}
        if not (self.is_last and is_tied):
            # Nothing is tied any more, and `transformers` would look for both.
            model._tied_weights_keys = {}
            model.all_tied_weights_keys = {}
