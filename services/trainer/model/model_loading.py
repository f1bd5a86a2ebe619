"""Loads the model to train from a Hugging Face directory: whole, or with an adapter on top."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.trainer.config import LoraSection
from services.trainer.model.attention import PACKED_ATTENTION
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.packing_check import check_packing
from services.trainer.model.precision import MASTER, compute_dtype
from services.trainer.model.trained_model import TrainedModel, checkpoint_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model, and how it is loaded."""

    path: Path
    """Hugging Face directory: configuration, safetensors, tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type in which it computes and is published (`precision`)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes CUDA if available."""
    num_threads: int = 1
    """CPU threads of PyTorch, set for the whole process."""
    lora: LoraSection | None = None
    """Train an adapter on the model; unset trains all weights."""
    keep_reference: bool = False
    """Keep the model as loaded from `path`, for a loss or advantages that need reference log-probs."""
    loss_reads_reference: bool = True
    """Whether each pack's pass computes them for the loss; else the pack brings them, or only advantages need them."""
    critic_learning_rate: float | None = None
    """Train a critic beside the model, at this rate; None for no critic."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, and recompute the rest."""


def load_trained(settings: ModelSettings, device: torch.device) -> TrainedModel:
    """The model to train, on its device, with the reference beside it if one is kept.

    Raises:
        UnsupportedModelError: packed rows would not train it on its own function.
        OSError: the directory does not hold a model.
    """
    # Trained weights and their reference are held in full precision; a base below an adapter is not.
    own = compute_dtype(settings.dtype, path=settings.path, device=device)
    model = _load_model(settings, device, dtype=MASTER if settings.lora is None else own)
    check_packing(model, settings.path)
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    if settings.lora is None:
        reference = _load_model(settings, device, dtype=MASTER) if settings.keep_reference else None
        return TrainedModel(model, reference=reference, published_dtype=own)
    # Imported here: importing PEFT takes a second, and most runs have no adapter.
    from services.trainer.model.lora import LoraModel

    return LoraModel(model, path=settings.path, config=settings.lora)


def _load_model(settings: ModelSettings, device: torch.device, *, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            settings.path, dtype=dtype, attn_implementation=PACKED_ATTENTION, local_files_only=True
        )
    except ValueError as error:
        raise UnsupportedModelError(f"{settings.path}: {error}") from error
    except KeyError as error:
        # From a table of attention functions in the model's own code.
        raise UnsupportedModelError(f"{settings.path}: its attention cannot be replaced by {error}") from error
    return model.eval().to(device)
