"""One process' part of the backend: a Hugging Face causal LM with AdamW, whole, or a shard of it (`Ranks`).

Its files are written by `checkpoints.rank_files`.

Invariants:
- One process and many run the same code; with one, calls that concern the others do nothing.
- Dropout is off, so log-probs are those of the published policy; only an adapter's dropout can be enabled.
- Weights and optimiser moments are float32, also in a checkpoint's `resume/`, which is exactly what was trained;
  forward passes, published and exported weights have the type of the settings (`precision`).
- Nothing is read from the network and nothing is unpickled: weights and optimiser state are safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.model.routers import NoRoutersError, read_routers
from penstock.storage.addresses import Address
from penstock.storage.storage import FileDigest
from penstock.v1.weights_pb2 import AdapterInfo
from services.trainer.algorithms.loss import LossFunction, LossInputs, LossOutputs
from services.trainer.batches.packing import Pack
from services.trainer.checkpoints.rank_files import RankFiles
from services.trainer.distributed.memory_share import memory_share
from services.trainer.model.attention import packed_inputs, register_packed_attention
from services.trainer.model.backend import (
    CheckpointMismatchError,
    LossTotals,
    NonFiniteGradientError,
    NonFiniteLossError,
    Quantity,
    StepMetrics,
    UnsupportedModelError,
)
from services.trainer.model.critic import Critic
from services.trainer.model.idle_pack import idle_pack
from services.trainer.model.learner import Learner
from services.trainer.model.model_loading import ModelSettings, load_trained
from services.trainer.model.precision import compute_dtype, computing_in
from services.trainer.model.ranks import Ranks
from services.trainer.model.routing_replay import RoutingReplay
from services.trainer.model.token_logprobs import TokenLogprobs
from services.trainer.model_state.optimizer_state import TrainingState
from services.trainer.model_state.weight_file import Part, part_of
from services.trainer.publishing.written_weights import WrittenWeights
from services.trainer.run_sections import OptimizerConfig

MIN_DECAY = 0.1
COPIES_SHARE = 0.5
"""Of the memory that is left, what a checkpoint's copies may take: the next step needs some as well."""
_FORMER_FOLDER = "companions"
"""Where checkpoints once kept a critic and a refreshed reference."""


class RankBackend:
    """A `Backend` in this process: all of it, or its part of a sharded one."""

    shares = (1.0,)

    def __init__(
        self,
        *,
        model: ModelSettings,
        optimizer: OptimizerConfig,
        loss: LossFunction,
        seed: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Loads the model; with `ranks` in all processes at once.

        Raises:
            UnsupportedModelError: Packed rows would not train the model on its own function.
            OSError: The directory does not hold a model.
        """
        torch.set_num_threads(model.num_threads)
        torch.manual_seed(seed)
        register_packed_attention()
        self._settings = model
        self._optimizer_config = optimizer
        self._loss = loss
        self._ranks = ranks or Ranks()
        self._device = self._ranks.device(model.device)
        self._dtype = compute_dtype(model.dtype, path=model.path, device=self._device)
        self._trained = load_trained(model, self._device, self._ranks)
        if self._ranks.rank > 0:
            # The same seed gave all processes the same initial weights; from here on, each draws its own numbers.
            torch.manual_seed(seed + self._ranks.rank)
        self._model = self._trained.network
        self._replay = _replay_of(model, self._model)
        self._idle_pack = idle_pack(self.vocab_size)
        with computing_in(self._dtype, self._device):
            self._token_logprobs = TokenLogprobs(*self._trained.networks, inputs=self._inputs(self._idle_pack))
        self._learner = Learner(self._trained.parameters(), optimizer, ranks=self._ranks)
        self._elsewhere = self._trained.elsewhere(self._ranks.elsewhere)
        """The trained tensors that other stages hold, by name."""
        self._critic = self._make_critic()
        self._num_batches = 0
        self._state = TrainingState(
            weights=self._trained.state_tensors(),
            policy=self._learner,
            critic=None if self._critic is None else self._critic.learner,
            reference=self._trained.reference_tensors(),
            rank=self._ranks.rank,
            elsewhere={
                *self._elsewhere,
                *map(self._trained.moments_name, self._elsewhere),
                *(() if self._critic is None else self._critic.elsewhere),
            },
        )
        self._files = RankFiles(self._trained, self._state, model_path=model.path, ranks=self._ranks, parts=self._parts)

    @property
    def adapter(self) -> AdapterInfo | None:
        """Settings of the LoRA adapter, if one is trained."""
        return self._trained.adapter

    @property
    def is_spread(self) -> bool:
        """Whether another process does not see the run's folder."""
        return self._ranks.beside is not None

    @property
    def num_held(self) -> int:
        """Numbers of the trained weights that are in this process."""
        local = (each.to_local() if isinstance(each, DTensor) else each for each in self._trained.parameters().values())
        return sum(each.numel() for each in local)

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    @property
    def max_sequence_length(self) -> int:
        """The limit in the model's configuration."""
        return int(self._model.config.get_text_config().max_position_embeddings)

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """Adds the gradient of this process' own pack, the only one in `packs`."""
        (given,) = packs
        is_idle = given is None or given.num_loss_tokens == 0
        if is_idle and self._ranks.num_ranks == 1:
            return LossTotals()
        # The other processes' passes need this one's shards: without work of its own it passes on a zero gradient.
        pack = self._idle_pack if given is None or is_idle else given
        with self._trained.training(), self._replaying(pack):
            logprobs = self._logprobs(self._model, pack)
        outputs = self._loss_of(pack, logprobs, self._reference_of_loss(pack))
        loss, totals = totals_of(outputs, num_tokens=pack.num_loss_tokens)
        is_finite = math.isfinite(loss)
        if not self._ranks.agree(is_finite):
            where = "another process" if is_finite else f"a pack of {pack.num_loss_tokens} loss tokens"
            raise NonFiniteLossError(f"the loss of {where} is {'not finite' if is_finite else loss}")
        if self._critic is not None and pack.returns is not None:
            value_loss = self._critic.forward_backward(pack, is_idle=is_idle)
            totals = totals.merged(LossTotals(sums={"value_loss": value_loss}))
        # Activations that are computed again need the same dropout, and the same experts.
        with self._trained.training(), self._replaying(pack):
            (outputs.loss * 0.0 if is_idle else outputs.loss).backward()
        # Of processes that have a pack together, one reports it.
        if is_idle or self._ranks.rank not in self._ranks.scorers:
            return LossTotals()
        return replace(totals, logprobs=(logprobs.detach().cpu().numpy(),))

    def score(self, *packs: Pack | None, quantity: Quantity) -> list[npt.NDArray[np.float32]]:
        """One pass of the policy, the reference or the critic over this process' own pack, the only one in `packs`."""
        (given,) = packs
        # As in `forward_backward`, the others' passes need this process' shards.
        pack = self._idle_pack if given is None else given
        with torch.no_grad():
            match quantity:
                case "logprobs":
                    with self._replaying(pack):
                        found = self._logprobs(self._model, pack)
                case "reference_logprobs":
                    found = self._reference_logprobs(pack)
                case "values":
                    found = None if self._critic is None else self._critic.values(pack)
        if found is None:
            raise ValueError(f"no model was kept that computes {quantity}")
        return [found.cpu().numpy() if given is not None else np.empty(0, dtype=np.float32)]

    def refresh_reference(self) -> None:
        """Copies the weights to the reference, if one is kept."""
        if self._settings.keep_reference:
            self._trained.refresh_reference()
            self._state.has_new_reference = True

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        """One step of AdamW, and of the critic's optimiser, at the scheduled learning rate."""
        if divisor < 1:
            raise ValueError(f"a step needs at least one token or sample, not {divisor}")
        norm = self._learner.gradient_norm() / divisor
        critic_norm = 0.0 if self._critic is None else self._critic.gradient_norm()
        if not math.isfinite(norm + critic_norm):
            self.discard_gradients()
            raise NonFiniteGradientError(f"the gradient norm is {norm + critic_norm}; no step was taken")
        learning_rate = self._learning_rate(self._num_batches)
        self._learner.step(divisor=divisor, norm=norm, learning_rate=learning_rate)
        if self._critic is not None:
            self._critic.step(norm=critic_norm, rate_factor=learning_rate / self._optimizer_config.learning_rate)
        self._num_batches += is_last
        return StepMetrics(grad_norm=norm, learning_rate=learning_rate, num_batches=self._num_batches)

    def discard_gradients(self) -> None:
        """Zeroes the gradients, the critic's too."""
        self._learner.discard_gradients()
        if self._critic is not None:
            self._critic.discard_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        """The trained weights in the type in which they are published, whole in process 0."""
        dtype = self._trained.published_dtype
        return {
            name: self._ranks.whole(tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)
            for name, tensor in self._trained.state_tensors().items()
        }

    def close(self) -> None:
        """Waits for the files that are being written."""
        self._files.close()

    def write_weights(self, path: Path) -> Future[WrittenWeights]:
        """Copies this process' part in the published type, which a separate thread writes."""
        return self._files.publish(path)

    def save(self, directory: Path) -> Future[None]:
        """Copies this process' part, which a separate thread writes; without memory for a copy waits until it has."""
        max_copied_bytes = COPIES_SHARE * memory_share(self._ranks.num_ranks)
        return self._files.save(directory, num_batches=self._num_batches, max_copied_bytes=max_copied_bytes)

    def upload(self, directory: Path, address: Address) -> Future[dict[str, FileDigest]]:
        """Copies this process' own shard, in the thread that wrote it."""
        return self._files.upload(directory, address)

    def load(self, source: Path | Address) -> None:
        """Reads and checks everything before it changes anything."""
        directory = self._files.on_disk(source)
        if (directory / _FORMER_FOLDER).exists():
            raise CheckpointMismatchError(
                f"{directory}: its critic or refreshed reference is in {_FORMER_FOLDER}/, which this version does not "
                "read; finish the run with the version that wrote it"
            )
        self._trained.check_saved(directory)
        self._num_batches = self._state.restore(directory, group=self._ranks.checkpoint_group, agree=self._ranks.agree)
        self.discard_gradients()

    def _parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        dtype, rank = self._trained.published_dtype, self._ranks.rank
        parts = {name: part_of(tensor, dtype=dtype, rank=rank) for name, tensor in tensors.items()}
        is_copy = self._ranks.is_copy
        return {name: part.left_to_others() if is_copy(tensors[name]) else part for name, part in parts.items()}

    def _make_critic(self) -> Critic | None:
        rate = self._settings.critic_learning_rate
        if rate is None:
            return None
        return self._new_critic(
            self._settings.path,
            dtype=self._dtype,
            device=self._device,
            ranks=self._ranks,
            learning_rate=rate,
            optimizer=self._optimizer_config,
            checkpoints_layers=self._settings.gradient_checkpointing,
            layers_per_stage=self._settings.layers_per_stage,
        )

    def _new_critic(self, *args: Any, **settings: Any) -> Critic:
        return Critic(*args, **settings)

    def _loss_of(self, pack: Pack, logprobs: Tensor, reference_logprobs: Tensor | None) -> LossOutputs:
        return self._loss(
            LossInputs(
                trainer_logprobs=logprobs,
                behavior_logprobs=self._tensor(pack.behavior_logprobs),
                advantages=self._tensor(pack.advantages),
                segments=self._tensor(pack.target_segments),
                proximal_logprobs=None if pack.proximal_logprobs is None else self._tensor(pack.proximal_logprobs),
                reference_logprobs=reference_logprobs,
            )
        )

    def _reference_of_loss(self, pack: Pack) -> Tensor | None:
        """The pack's own, or a pass of the reference; decided by the settings, so that all processes do the same."""
        if self._settings.loss_reads_reference:
            return self._reference_logprobs(pack)
        return None if pack.reference_logprobs is None else self._tensor(pack.reference_logprobs)

    def _reference_logprobs(self, pack: Pack) -> Tensor | None:
        if not self._settings.keep_reference:
            return None
        with torch.no_grad(), self._trained.as_reference() as model:
            return self._logprobs(model, pack)

    def _replaying(self, pack: Pack) -> AbstractContextManager[None]:
        """The context of the policy's passes over a pack; not of a reference's, even if its module is the same."""
        if self._replay is None or pack is self._idle_pack:
            return nullcontext()
        if pack.routes is None:
            raise ValueError("algorithm.routing_replay: the samples of a pack come without routes")
        return self._replay.of(pack.routes, self._device)

    def _inputs(self, pack: Pack) -> dict[str, Any]:
        return packed_inputs(pack, self._device)

    def _logprobs(self, model: Any, pack: Pack) -> Tensor:
        """Log-probs of the loss tokens, float32[N]."""
        return self._logprobs_of(model, pack, self._inputs(pack))

    def _logprobs_of(self, model: Any, pack: Pack, inputs: dict[str, Any]) -> Tensor:
        with computing_in(self._dtype, self._device):
            return self._token_logprobs.of(
                model,
                inputs,
                positions_n=self._tensor(pack.logit_positions),
                targets_n=self._tensor(pack.target_ids),
                temperatures_n=None if pack.temperatures is None else self._tensor(pack.temperatures),
            )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _learning_rate(self, num_batches_before: int) -> float:
        """Linear warm-up, then constant or a linear fall to a tenth."""
        config = self._optimizer_config
        factor = min(1.0, (num_batches_before + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.decay_steps:
            factor *= max(MIN_DECAY, 1.0 - (1.0 - MIN_DECAY) * num_batches_before / config.decay_steps)
        return config.learning_rate * factor


def _replay_of(settings: ModelSettings, network: Any) -> RoutingReplay | None:
    if not settings.replays_routes:
        return None
    try:
        return RoutingReplay(network, read_routers(settings.path, field="algorithm.routing_replay"))
    except NoRoutersError as error:
        raise UnsupportedModelError(str(error)) from error


def totals_of(outputs: LossOutputs, *, num_tokens: int) -> tuple[float, LossTotals]:
    """The loss and the report as numbers, with one transfer from the device."""
    scalars = [outputs.loss.detach(), *outputs.sums.values(), *outputs.maxima.values()]
    loss, *values = torch.stack([scalar.float() for scalar in scalars]).tolist()
    split = len(outputs.sums)
    return loss, LossTotals(
        num_tokens=num_tokens,
        sums=dict(zip(outputs.sums, values[:split], strict=True)),
        maxima=dict(zip(outputs.maxima, values[split:], strict=True)),
    )
