"""Builds the policy to train from a run's configuration. The only module of the service that imports torch."""

from __future__ import annotations

from functools import partial

import structlog
from transformers.utils.logging import disable_progress_bar

from penstock.config import ConfigError
from penstock.memory.malloc import return_buffers
from services.trainer.algorithms.base import Clip
from services.trainer.algorithms.loss import LossSettings, policy_loss
from services.trainer.algorithms.terms.correction import Correction, CorrectionLevel
from services.trainer.algorithms.terms.kl import KlEstimator
from services.trainer.config import TrainingConfig
from services.trainer.data.tokenizer import HuggingFaceTokenizer
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.distributed.torchrun_runs import TorchrunRuns
from services.trainer.model.backend import Backend
from services.trainer.model.model_loading import ModelSettings
from services.trainer.model.ranks import Ranks
from services.trainer.run.context import Policy
from services.trainer.run.memory_fit import fit_memory
from services.trainer.run_sections import critic_rate
from services.trainer.step.step_settings import is_reference_early

LARGE_BYTES, SMALL_BYTES = 8 << 20, 256 << 10
"""From which on a CPU's freed buffers return to the system: weights that are gathered layer by layer, or unpacked for
each product, leave them in pieces otherwise, hundreds of MB at the peak."""
_log = structlog.get_logger()


def load_policy(config: TrainingConfig, torchrun: TorchrunRuns | None = None) -> Policy:
    """The model with its optimiser, and its tokenizer.

    Args:
        config: Of the run.
        torchrun: The launch of the other processes, if torchrun started them.

    Raises:
        ConfigError: The directory holds no usable model or tokenizer.
        BackendError: The model cannot be trained on packed rows.
    """
    # Progress bars that redraw themselves garble a service's log.
    disable_progress_bar()
    tokenizer = HuggingFaceTokenizer(config.model.folder)
    try:
        backend = _backend(config, torchrun)
    except OSError as error:
        raise ConfigError(f"model.path: {config.model.path}: no usable model: {error}") from error
    return Policy(backend=backend, tokenizer=tokenizer)


def _backend(config: TrainingConfig, torchrun: TorchrunRuns | None) -> Backend:
    if len(config.trainer.shares) == 1:
        return local_backend(config)
    # Imported here: a single process does not need them.
    from services.trainer.distributed.coordinator import lead
    from services.trainer.run.mesh_fit import check_mesh

    check_mesh(config)
    return lead(config, build=local_backend, torchrun=torchrun)


def local_backend(config: TrainingConfig, ranks: Ranks | None = None) -> Backend:
    """The backend, or this process' part of it; raises OSError, BackendError."""
    algorithm = config.algorithm.definition
    ranks = ranks or Ranks()
    if ranks.device(config.trainer.device).type == "cpu":
        return_buffers(from_bytes=LARGE_BYTES if config.lora is None or config.lora.base == "auto" else SMALL_BYTES)
    fit = fit_memory(config, ranks)
    ranks.offloads = fit.offloads
    kind = RankBackend
    if ranks.num_stages > 1:
        # Imported here: it needs torch.distributed.
        from services.trainer.distributed.stage_backend import StageBackend

        kind = StageBackend
    backend = kind(
        model=ModelSettings(
            path=config.model.folder,
            lora=config.lora,
            dtype=config.model.dtype,
            device=config.trainer.device,
            num_threads=config.trainer.num_threads,
            keep_reference=config.algorithm.has_trainer_reference,
            loss_reads_reference=(
                not config.algorithm.has_scorer
                and not algorithm.is_kl_in_reward
                and not is_reference_early(config.algorithm)
            ),
            layers_per_stage=config.trainer.parallel.layers_per_stage,
            critic_learning_rate=critic_rate(config) if config.algorithm.has_trainer_critic else None,
            gradient_checkpointing=fit.recomputes,
            replays_routes=config.algorithm.routing_replay,
        ),
        optimizer=config.optimizer,
        loss=partial(policy_loss, algorithm=algorithm, settings=loss_settings(config)),
        seed=config.run.seed,
        ranks=ranks,
    )
    if ranks.num_ranks > 1:
        _log.info(
            "process in its place",
            rank=ranks.rank,
            processes=ranks.num_ranks,
            shards=ranks.num_shards,
            splits=ranks.num_splits,
            expert_shards=ranks.num_expert_shards,
            stage=f"{ranks.stage_index + 1} of {ranks.num_stages}",
            holds=backend.num_held,
        )
    return backend


def loss_settings(config: TrainingConfig) -> LossSettings:
    """The settings of a run's loss."""
    settings, algorithm = config.algorithm, config.algorithm.definition
    return LossSettings(
        clip=Clip(
            low=algorithm.clip.low if settings.clip_low is None else settings.clip_low,
            high=algorithm.clip.high if settings.clip_high is None else settings.clip_high,
        ),
        normalization=settings.normalization or algorithm.normalization,
        max_new_tokens=config.sampling.max_new_tokens,
        kl_coefficient=0.0 if algorithm.is_kl_in_reward else settings.kl_coefficient,
        kl_estimator=KlEstimator(settings.kl_estimator),
        correction=Correction.NONE if algorithm.is_off_policy else Correction(settings.correction),
        correction_level=CorrectionLevel(settings.correction_level),
        max_importance_weight=settings.max_importance_weight,
    )
