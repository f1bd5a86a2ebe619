"""A process of a trainer other than its first: python -m services.trainer.worker_process, started by the first one."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from penstock.process.log_setup import configure_logging
from penstock.storage.fetched import forget_copies
from services.trainer.config import TrainingConfig
from services.trainer.distributed.coordinator import build_part
from services.trainer.distributed.launch import (
    DEVICE_KEY,
    EXPERT_KEY,
    ISLANDS_KEY,
    REPLICAS_KEY,
    SPLITS_KEY,
    STAGES_KEY,
    STORE_VARIABLE,
    Place,
    end_process,
)
from services.trainer.distributed.process_group import RankGroup
from services.trainer.distributed.rank_worker import follow, ignore_signals
from services.trainer.distributed.torchrun_runs import TorchrunRuns
from services.trainer.model.backend import Backend
from services.trainer.run.policy_loading import local_backend

if TYPE_CHECKING:
    from torch.distributed import Store

_LOST = "by peer"
"""In gloo's message: a connection that was closed, or reset."""


def follow_under_torchrun(place: Place, runs: TorchrunRuns) -> None:
    """Serve the runs of the coordinator until it ends."""
    while (store := runs.wait()) is not None:
        _follow_one(store, rank=place.rank, num_ranks=place.num_ranks, local_rank=place.local_rank)
        runs.is_under_way = False


def main() -> None:
    """Serve one run of the process that started this one."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    configure_logging(f"trainer-{rank}", level="info", log_format="text")
    ignore_signals()
    store = dist.FileStore(os.environ[STORE_VARIABLE], num_ranks)
    try:
        _follow_one(store, rank=rank, num_ranks=num_ranks, local_rank=rank)
    except RuntimeError as error:
        # Of gloo: a process that is gone, while this one waits for it. The first process says which, and ends all.
        if _LOST not in str(error):
            raise
        end_process("it waited for another process of the trainer, which is gone")


def _follow_one(store: Store, *, rank: int, num_ranks: int, local_rank: int) -> None:
    forget_copies()
    # The coordinator names the place, since only it knows the run.
    device = store.get(DEVICE_KEY).decode()
    group = RankGroup(
        store,
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        device=device,
        num_replicas=int(store.get(REPLICAS_KEY)),
        num_stages=int(store.get(STAGES_KEY)),
        num_splits=int(store.get(SPLITS_KEY)),
        expert_size=int(store.get(EXPERT_KEY)),
        islands=json.loads(store.get(ISLANDS_KEY)),
    )
    follow(group, _build)
    group.close()


def _build(config_json: str, group: RankGroup) -> Backend:
    disable_progress_bar()
    if json.loads(config_json).get("is_critic"):
        # Imported here: a trainer's processes do not need it.
        from services.trainer.critic.config import CriticProcesses
        from services.trainer.critic.trained_critic import part_of

        critic = CriticProcesses.model_validate_json(config_json)
        return build_part(critic, group, partial(part_of, critic))
    return build_part(TrainingConfig.model_validate_json(config_json), group, local_backend)


if __name__ == "__main__":
    main()
