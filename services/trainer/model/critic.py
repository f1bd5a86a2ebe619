"""Implements PPO's critic: a network of the policy's architecture whose head estimates a state's value.

Invariants:
- It begins as a copy of the policy with a head of zeros: every state has value 0 until it has learned.
- It learns from the same packs as the policy and steps when the policy steps; its gradient is always the mean over the
  step's tokens, however the policy's is averaged.
- If several processes train together, it is divided like the policy, and every process makes every call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer.algorithms.ppo import value_losses
from services.trainer.batches.packing import Pack
from services.trainer.model.attention import packed_inputs
from services.trainer.model.backend import NonFiniteLossError
from services.trainer.model.learner import Learner
from services.trainer.model.precision import MASTER, computing_in
from services.trainer.model.ranks import Ranks
from services.trainer.model.trained_model import checkpoint_layers
from services.trainer.model.weight_loading import load_weights
from services.trainer.run_sections import OptimizerConfig

_HEAD = ("head.weight", "head.bias")


class Critic:
    """Values of states, and the optimiser that learns them.

    Args:
        path: The policy's directory.
        dtype: Element type in which the network computes; its weights, and the head, are float32.
        device: Its device.
        ranks: The processes over which it is sharded.
        learning_rate: Its peak rate, with the policy's warm-up and decay.
        optimizer: The policy's optimiser settings.
        checkpoints_layers: Whether layers compute their activations again in the backward pass.
        layers_per_stage: Of the stages into which the processes cut it; None for even ones.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        learning_rate: float,
        optimizer: OptimizerConfig,
        checkpoints_layers: bool = False,
        layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        model = load_weights(
            path,
            dtype=MASTER,
            computing=dtype,
            device=device,
            ranks=ranks,
            sharded=_parts,
            layers_per_stage=layers_per_stage,
            has_output=False,
        )
        if checkpoints_layers:
            checkpoint_layers(model)
        self._network: Any = model.base_model
        self._head: Any = nn.Linear(self._network.config.get_text_config().hidden_size, 1, device=device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._ranks = ranks
        ranks.shard(self._head, computing=MASTER)
        modules = {"network": self._network, "head": self._head}
        if ranks.stage_index < ranks.num_stages - 1:
            # The last stage's, which alone has values.
            del modules["head"]
        parameters: dict[str, Tensor] = {
            f"{module}.{name}": parameter
            for module, holder in modules.items()
            for name, parameter in holder.named_parameters()
        }
        prefix = f"{model.base_model_prefix}."
        self.elsewhere = frozenset(
            (*(f"network.{name.removeprefix(prefix)}" for name in (*ranks.elsewhere, *ranks.copies)), *_HEAD)
        ) - frozenset(parameters)
        """Names of tensors that only other stages hold, and some that no stage does."""
        self.learner = Learner(parameters, optimizer, ranks=ranks)
        """Trains it, and is saved with it."""
        self._device, self._dtype = device, dtype
        self._learning_rate = learning_rate
        self._num_tokens = 0

    def values(self, pack: Pack) -> Tensor:
        """Values of the states before the loss tokens, float32[N], with gradient if enabled."""
        return self._values_of(pack, packed_inputs(pack, self._device))

    def _values_of(self, pack: Pack, inputs: dict[str, Any]) -> Tensor:
        with computing_in(self._dtype, self._device):
            hidden_1th: Tensor = self._network(**inputs).last_hidden_state
        worth_n1: Tensor = self._head(hidden_1th[0, self._tensor(pack.logit_positions)].float())
        return worth_n1[:, 0]

    def forward_backward(self, pack: Pack, *, is_idle: bool = False) -> float:
        """Adds the gradient of a pack that has values and returns; returns the sum of its losses.

        Args:
            pack: This process' own.
            is_idle: The pass only serves the other processes, and adds nothing.

        Raises:
            NonFiniteLossError: Nothing was added.
        """
        loss = self._loss(pack, self.values(pack))
        total = float(loss.detach())
        self._require_finite(total, pack)
        (loss * 0.0 if is_idle else loss).backward()
        return self._counted(total, pack, is_idle=is_idle)

    def _loss(self, pack: Pack, values_n: Tensor) -> Tensor:
        """The sum over the pack's tokens."""
        assert pack.values is not None
        assert pack.returns is not None
        return value_losses(values_n, self._tensor(pack.values), self._tensor(pack.returns)).sum()

    def _require_finite(self, total: float, pack: Pack) -> None:
        is_finite = math.isfinite(total)
        if not self._ranks.agree(is_finite):
            where = f"a pack of {pack.num_loss_tokens} loss tokens" if not is_finite else "another process"
            raise NonFiniteLossError(f"the critic's loss of {where} is {'not finite' if is_finite else total}")

    def _counted(self, total: float, pack: Pack, *, is_idle: bool) -> float:
        """The loss to report of a pack that was trained on; of processes that have it together, one counts it."""
        if is_idle or self._ranks.rank not in self._ranks.scorers:
            return 0.0
        self._num_tokens += pack.num_loss_tokens
        return total

    def configure(self, settings: OptimizerConfig) -> None:
        """Later steps use these settings, with their learning rate as the peak."""
        self.learner.configure(settings)
        self._learning_rate = settings.learning_rate

    def gradient_norm(self) -> float:
        """Norm of the gradient of the mean over the tokens of all processes so far."""
        return self.learner.gradient_norm() / max(1, self._ranks.added_up(self._num_tokens))

    def step(self, *, norm: float, rate_factor: float) -> None:
        """Takes the optimiser step on a gradient of that norm, at the peak rate times the schedule's factor."""
        num_tokens = self._ranks.added_up(self._num_tokens)
        if num_tokens:
            self.learner.step(divisor=num_tokens, norm=norm, learning_rate=self._learning_rate * rate_factor)
        self._num_tokens = 0

    def discard_gradients(self) -> None:
        """Discard the accumulated gradient."""
        self.learner.discard_gradients()
        self._num_tokens = 0

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _parts(model: PreTrainedModel) -> Iterable[nn.Module]:
    """Of a policy: what a critic keeps, and apart from it the head, which is dropped."""
    return model.base_model, model.get_output_embeddings()
