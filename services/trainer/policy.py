"""The policy to train, built from a run's configuration. The only module of the service that brings torch in."""

from __future__ import annotations

from functools import partial

from transformers.utils.logging import disable_progress_bar

from penstock.config import ConfigError
from services.trainer.config import TrainingConfig
from services.trainer.context import Policy
from services.trainer.losses import Correction, PolicyLossSettings, policy_loss
from services.trainer.single_process_backend import ModelSettings, SingleProcessBackend
from services.trainer.tokenizer import HuggingFaceTokenizer


def load_policy(config: TrainingConfig) -> Policy:
    """The model with its optimiser, and its tokenizer.

    Raises:
        ConfigError: The directory holds no usable model or tokenizer.
        BackendError: The model cannot be trained on packed rows.
    """
    # A service's log is read by people and programs; bars that redraw themselves spoil it.
    disable_progress_bar()
    algorithm = config.algorithm
    loss_settings = PolicyLossSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_beta=algorithm.kl_coefficient,
        correction=Correction(algorithm.correction),
    )
    tokenizer = HuggingFaceTokenizer(config.model.path)
    try:
        backend = SingleProcessBackend(
            model=ModelSettings(
                path=config.model.path,
                lora=config.lora,
                dtype=config.model.dtype,
                device=config.trainer.device,
                num_threads=config.trainer.num_threads,
                temperature=config.sampling.temperature,
                keep_reference=algorithm.kl_coefficient > 0,
            ),
            optimizer=config.optimizer,
            loss=partial(policy_loss, settings=loss_settings),
            seed=config.run.seed,
        )
    except OSError as error:
        raise ConfigError(f"model.path: {config.model.path}: no usable model: {error}") from error
    return Policy(backend=backend, tokenizer=tokenizer)
