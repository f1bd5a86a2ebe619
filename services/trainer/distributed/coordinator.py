"""Runs process 0 of a multi-process run: starts the others and returns the backend that drives them."""

from __future__ import annotations

import json
from collections.abc import Callable

from services.trainer.config import TrainingConfig
from services.trainer.distributed.launch import (
    DEVICE_KEY,
    EXPERT_KEY,
    ISLANDS_KEY,
    REPLICAS_KEY,
    SPLITS_KEY,
    STAGES_KEY,
    StartedRanks,
    end_process,
)
from services.trainer.distributed.process_group import RankGroup
from services.trainer.distributed.sharded_backend import ShardedBackend
from services.trainer.distributed.torchrun_runs import TorchrunRuns
from services.trainer.model.backend import Backend, UnsupportedModelError
from services.trainer.model.ranks import Ranks

Build = Callable[[TrainingConfig, Ranks | None], Backend]


def lead(
    config: TrainingConfig,
    *,
    build: Build,
    torchrun: TorchrunRuns | None,
    on_lost: Callable[[str], None] = end_process,
    kind: type[ShardedBackend] = ShardedBackend,
) -> ShardedBackend:
    """The backend of a run of `config.trainer.processes`; call it, and all of its calls, in one thread.

    Args:
        config: Of the run.
        build: Makes one process' part.
        torchrun: The launch by torchrun if it started the other processes; None starts them here.
        on_lost: See `ShardedBackend`.
        kind: What is returned.

    Raises:
        BackendError: A process cannot hold its part.
        ConfigError: Processes on other machines see other files.
    """
    num_ranks = len(config.trainer.shares)
    started = StartedRanks(num_ranks=num_ranks, on_lost=on_lost)
    store = started.start() if torchrun is None else torchrun.begin()
    store.set(DEVICE_KEY, config.trainer.device)
    num_replicas, _ = config.trainer.parallel.mesh(num_ranks)
    num_stages = config.trainer.parallel.pipeline
    store.set(REPLICAS_KEY, str(num_replicas))
    islands = config.trainer.parallel.islands or ()
    num_splits = config.trainer.parallel.tensor
    store.set(STAGES_KEY, str(num_stages))
    store.set(SPLITS_KEY, str(num_splits))
    expert_size = config.trainer.parallel.expert
    store.set(EXPERT_KEY, str(expert_size))
    store.set(ISLANDS_KEY, json.dumps(islands))
    return kind(
        RankGroup(
            store,
            rank=0,
            num_ranks=num_ranks,
            local_rank=0,
            device=config.trainer.device,
            num_replicas=num_replicas,
            num_stages=num_stages,
            num_splits=num_splits,
            expert_size=expert_size,
            islands=islands,
        ),
        build=lambda group: build_part(config, group, build),
        config_json=config.model_dump_json(),
        # Of processes that have packs together, and the same share.
        shares=[config.trainer.shares[ranks[0]] for ranks in config.trainer.parallel.together(num_ranks)],
        on_lost=on_lost,
        on_close=started.close,
        files=None if torchrun is None else (config.run.dir / config.run.id, config.model.path),
        needs_one_folder=config.run.checkpoint_storage is None,
    )


def build_part(config: TrainingConfig, group: RankGroup, build: Build) -> Backend:
    """One process' part; a problem with the model's files is an error in all processes alike."""
    try:
        return build(config, group)
    except OSError as error:
        raise UnsupportedModelError(f"{config.model.path}: no usable model: {error}") from error
