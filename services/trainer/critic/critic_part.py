"""One process' part of a critic: all of it, or a shard; the calls of a `Backend` as far as a critic has them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from penstock.storage.addresses import Address
from services.trainer.batches.packing import Pack
from services.trainer.checkpoints.tensor_copies import write_copies
from services.trainer.critic.config import CriticProcesses
from services.trainer.distributed.memory_share import memory_share
from services.trainer.distributed.rank_backend import COPIES_SHARE
from services.trainer.model.attention import register_packed_attention
from services.trainer.model.backend import LossTotals, Quantity
from services.trainer.model.critic import Critic
from services.trainer.model.idle_pack import idle_pack
from services.trainer.model.precision import compute_dtype
from services.trainer.model.ranks import Ranks
from services.trainer.model_state.dcp import write_resume
from services.trainer.model_state.optimizer_state import TrainingState
from services.trainer.run_sections import OptimizerConfig

LOSS, NORM = "value_loss", "gradient_norm"
"""What `forward_backward` reports: a sum of losses, and a norm, which is that of the whole in every process."""


class CriticPart:
    """A critic with its optimiser, or this process' shard of both; one thread at a time."""

    shares = (1.0,)

    def __init__(self, config: CriticProcesses, ranks: Ranks | None = None) -> None:
        """Begins as a copy of the model; to be configured before its first step.

        Raises:
            UnsupportedModelError: Packed rows would not train the model on its own function.
            OSError: The directory does not hold a model.
        """
        # Progress bars that redraw themselves garble a service's log.
        disable_progress_bar()
        torch.set_num_threads(config.trainer.num_threads)
        register_packed_attention()
        self._ranks = ranks or Ranks()
        folder = config.model.folder
        device = self._ranks.device(config.trainer.device)
        self._critic = Critic(
            folder,
            dtype=compute_dtype(config.model.dtype, path=folder, device=device),
            device=device,
            ranks=self._ranks,
            learning_rate=config.optimizer.learning_rate,
            optimizer=config.optimizer,
            checkpoints_layers=bool(config.trainer.gradient_checkpointing),
        )
        learner = self._critic.learner
        self._state = TrainingState(
            weights={name: each.detach() for name, each in learner.parameters.items()},
            policy=learner,
            critic=None,
            reference={},
            rank=self._ranks.rank,
        )
        text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.max_sequence_length = int(text.max_position_embeddings)
        self._idle_pack = idle_pack(self.vocab_size)
        self._num_steps = 0
        """Steps of the run, each of one or several minibatches, that it has learned from."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Later steps use these settings of an optimiser; the learning rate is the critic's peak."""
        self._critic.configure(OptimizerConfig.model_validate(settings))

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """Adds the gradient of this process' own pack, the only one in `packs`; raises NonFiniteLossError."""
        (given,) = packs
        is_idle = given is None or given.num_loss_tokens == 0
        # The other processes' passes need this one's shards.
        pack = self._idle_pack if given is None or is_idle else given
        loss = self._critic.forward_backward(pack, is_idle=is_idle)
        return LossTotals(num_tokens=1, sums={LOSS: loss}, maxima={NORM: self._critic.gradient_norm()})

    def score(self, *packs: Pack | None, quantity: Quantity = "values") -> list[npt.NDArray[np.float32]]:
        """Values of the states before the loss tokens of its own pack, float32[N]."""
        (given,) = packs
        with torch.no_grad():
            found = self._critic.values(self._idle_pack if given is None else given)
        return [found.cpu().numpy() if given is not None else np.empty(0, dtype=np.float32)]

    def take_step(self, *, rate_factor: float, is_last: bool) -> None:
        """Takes the optimiser step on the gradient, whose norm is finite."""
        self._critic.step(norm=self._critic.gradient_norm(), rate_factor=rate_factor)
        self._num_steps += is_last

    def discard_gradients(self) -> None:
        """Discards the accumulated gradient."""
        self._critic.discard_gradients()

    def save(self, directory: Path) -> Future[None]:
        """Copies its part and writes it in the background; without memory for a copy waits until it has."""
        state = self._state.collect(num_batches=self._num_steps)
        max_copied_bytes = COPIES_SHARE * memory_share(self._ranks.num_ranks)
        return write_copies(self._writer, partial(self._write, directory), state, max_copied_bytes=max_copied_bytes)

    def load(self, source: Path | Address) -> None:
        """Continues from what `save` wrote; raises CheckpointMismatchError and then changes nothing."""
        group, agree = self._ranks.checkpoint_group, self._ranks.agree
        self._num_steps = self._state.restore(Path(source), group=group, agree=agree)
        self.discard_gradients()

    def close(self) -> None:
        """Waits for the files that are being written."""
        self._writer.shutdown(wait=True)

    def _write(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        write_resume(tensors, directory, group=self._ranks.checkpoint_group)
