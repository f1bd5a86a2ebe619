"""Loads the model to train from a Hugging Face directory: whole, or with an adapter on top."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from penstock.memory.collector import collect_as_usual
from services.trainer.model.packing_check import check_packing, check_rotary
from services.trainer.model.precision import MASTER, compute_dtype
from services.trainer.model.ranks import Ranks
from services.trainer.model.trained_model import TrainedModel, checkpoint_layers
from services.trainer.model.weight_loading import load_weights
from services.trainer.run_sections import LoraSection


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
    layers_per_stage: tuple[int, ...] | None = None
    """Of the stages into which the processes cut the model; None for even ones."""
    critic_learning_rate: float | None = None
    """Train a critic beside the model, at this rate; None for no critic."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, and recompute the rest."""
    replays_routes: bool = False
    """Take the experts of each token that packs bring."""


def load_trained(settings: ModelSettings, device: torch.device, ranks: Ranks) -> TrainedModel:
    """The model to train, on its device, with the reference beside it if one is kept; sharded over the processes.

    Raises:
        UnsupportedModelError: packed rows would not train it on its own function, or its weights do not fit it.
        OSError: the directory does not hold a model.
    """
    collect_as_usual()
    # Trained weights are held in full precision; their reference, or a base below an adapter, is not.
    own = compute_dtype(settings.dtype, path=settings.path, device=device)
    if settings.lora is not None:
        return _load_adapted(settings, device, ranks, dtype=own)
    load = partial(
        load_weights,
        settings.path,
        computing=own,
        device=device,
        ranks=ranks,
        layers_per_stage=settings.layers_per_stage,
    )
    model = load(dtype=MASTER)
    _check(model, settings, ranks, computing=own)
    # It does not learn: in the type in which it computes it computes the same.
    reference = load(dtype=own) if settings.keep_reference else None
    return TrainedModel(model, reference=reference, published_dtype=own)


def load_frozen(path: Path, *, computing: torch.dtype, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """A model that does not learn, alone on its device; raises as `load_trained`."""
    model = load_weights(path, dtype=computing, computing=computing, device=device, ranks=ranks)
    check_packing(model, path, ranks, computing=computing)
    return model.requires_grad_(False)


def _load_adapted(settings: ModelSettings, device: torch.device, ranks: Ranks, *, dtype: torch.dtype) -> TrainedModel:
    # Imported here: importing PEFT takes a second, and most runs have no adapter.
    from services.trainer.model.adapters.injection import Injection
    from services.trainer.model.adapters.lora import LoraModel

    assert settings.lora is not None
    injection = Injection(settings.lora, ranks, device)
    model = load_weights(
        settings.path,
        dtype=dtype,
        computing=dtype,
        device=device,
        ranks=ranks,
        sharded=injection.around,
        layers_per_stage=settings.layers_per_stage,
    )
    injection.fill()
    # Factors move, and FSDP takes them over.
    model.eval().to(device)
    _check(model, settings, ranks, computing=dtype)
    digest = ranks.model_digest(settings.path)
    return LoraModel(model, injection=injection, path=settings.path, config=settings.lora, base_digest=digest)


def _check(model: PreTrainedModel, settings: ModelSettings, ranks: Ranks, *, computing: torch.dtype) -> None:
    """Refuse a model that packed rows would not train on its own function, and prepare another for its passes."""
    if ranks.num_stages == 1:
        check_packing(model, settings.path, ranks, computing=computing)
    else:
        # What can be cut are families known to train on packed rows, and no stage computes log-probs alone.
        check_rotary(model, f"{settings.path}: {model.config.model_type}")
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
