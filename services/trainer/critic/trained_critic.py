"""A critic with its optimiser in one process: values, gradients, steps and checkpoints."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from penstock.storage.addresses import Address
from services.trainer.batches.packing import Pack
from services.trainer.critic.config import CriticConfig
from services.trainer.distributed.memory_share import memory_share
from services.trainer.distributed.rank_backend import COPIES_SHARE
from services.trainer.model.attention import register_packed_attention
from services.trainer.model.critic import Critic
from services.trainer.model.precision import compute_dtype
from services.trainer.model.ranks import Ranks
from services.trainer.model_state.dcp import write_resume
from services.trainer.model_state.optimizer_state import TrainingState
from services.trainer.run_sections import OptimizerConfig


class TrainedCritic:
    """Computes what a critic in the trainer would, by the same code; one thread at a time."""

    def __init__(self, config: CriticConfig, folder: Path) -> None:
        """Begins as a copy of the model in `folder`; to be configured before its first step.

        Raises:
            UnsupportedModelError: Packed rows would not train the model on its own function.
            OSError: The directory does not hold a model.
        """
        # Progress bars that redraw themselves garble a service's log.
        disable_progress_bar()
        torch.set_num_threads(config.num_threads)
        register_packed_attention()
        ranks = Ranks()
        device = ranks.device(config.device)
        self._critic = Critic(
            folder,
            dtype=compute_dtype(config.dtype, path=folder, device=device),
            device=device,
            ranks=ranks,
            learning_rate=OptimizerConfig().learning_rate,
            optimizer=OptimizerConfig(),
            checkpoints_layers=config.gradient_checkpointing,
        )
        learner = self._critic.learner
        self._state = TrainingState(
            weights={name: each.detach() for name, each in learner.parameters.items()},
            policy=learner,
            critic=None,
            reference={},
            rank=0,
        )
        text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.max_sequence_length = int(text.max_position_embeddings)
        self.num_steps = 0
        """Steps of the run, each of one or several minibatches, that it has learned from."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def configure(self, optimizer: OptimizerConfig) -> None:
        """Later steps use these settings; the learning rate is the critic's peak."""
        self._critic.configure(optimizer)

    def values(self, pack: Pack) -> npt.NDArray[np.float32]:
        """Values of the states before the pack's loss tokens, float32[N]."""
        with torch.no_grad():
            found: npt.NDArray[np.float32] = self._critic.values(pack).cpu().numpy()
        return found

    def accumulate(self, pack: Pack) -> tuple[float, float]:
        """Adds the gradient of a pack; returns the sum of its losses, and the norm of the mean gradient so far.

        Raises:
            NonFiniteLossError: Nothing was added.
        """
        loss = self._critic.forward_backward(pack)
        return loss, self._critic.gradient_norm()

    def discard_gradients(self) -> None:
        """Discards the accumulated gradient."""
        self._critic.discard_gradients()

    def step(self, *, rate_factor: float, is_last: bool) -> None:
        """Takes the optimiser step on the gradient, whose norm is finite."""
        norm = self._critic.gradient_norm()
        assert math.isfinite(norm)
        self._critic.step(norm=norm, rate_factor=rate_factor)
        self.num_steps += is_last

    def save(self, directory: Path) -> Future[None]:
        """Copies everything now and writes it in the background; without memory for a copy waits until it has."""
        state = self._state.collect(num_batches=self.num_steps)
        if sum(each.nbytes for each in state.values()) > COPIES_SHARE * memory_share(1):
            written = self._writer.submit(_write, directory, state)
            wait([written])
            return written
        copies = {name: each.detach().to("cpu", copy=True) for name, each in state.items()}
        return self._writer.submit(_write, directory, copies)

    def load(self, source: Path | Address) -> None:
        """Continues from what `save` wrote; raises CheckpointMismatchError and then changes nothing."""
        self.num_steps = self._state.restore(Path(source))
        self.discard_gradients()


def _write(directory: Path, tensors: dict[str, Tensor]) -> None:
    write_resume(tensors, directory)
