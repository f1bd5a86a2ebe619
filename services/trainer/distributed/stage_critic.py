"""A critic that is cut into the stages of its policy: values and losses are those of the last stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.trainer.batches.packing import Pack
from services.trainer.distributed.stage_link import StageLink
from services.trainer.model.critic import Critic
from services.trainer.model.precision import computing_in


class StageCritic(Critic):
    """One stage's part of a `Critic`.

    Args:
        link: To the other stages.
        settings: Of a `Critic`.
    """

    def __init__(self, *args: Any, link: StageLink, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._link = link
        self.modules = [self._network, self._head] if link.is_last else [self._network]
        """Those that are called, sharded each for itself."""

    def values(self, pack: Pack) -> Tensor:
        """Of a microbatch, float32[N]; zeros in all stages but the last."""
        _, found = self._passed(pack)
        return found if self._link.is_last else torch.zeros(pack.num_loss_tokens, device=self._device)

    def forward_backward(self, pack: Pack, *, is_idle: bool = False) -> float:
        """As a pipeline of microbatches; the sum of losses is known in the last stage, and 0 in the others."""
        with self._link.gathered(self.modules):
            total = self._passes(pack, is_idle=is_idle)
        return self._counted(total, pack, is_idle=is_idle)

    def _passes(self, pack: Pack, *, is_idle: bool) -> float:
        microbatches = self._link.microbatches(pack)
        outputs = [self._passed(each) for each in microbatches]
        if self._link.is_last:
            losses = [self._loss(each, found) for each, (_, found) in zip(microbatches, outputs, strict=True)]
            total = sum(float(loss.detach()) for loss in losses)
            outputs = [(received, loss) for (received, _), loss in zip(outputs, losses, strict=True)]
        else:
            total = 0.0
        self._link.settle()
        self._require_finite(total, pack)
        for number, (received, found) in enumerate(outputs, 1):
            scaled = found * 0.0 if is_idle and self._link.is_last else found
            self._link.backward(self.modules, received, scaled, is_last=number == len(outputs))
        self._link.settle()
        return total

    def _passed(self, pack: Pack) -> tuple[Tensor | None, Tensor]:
        return self._link.passed(pack, layers=self._layers, end=lambda inputs: self._values_of(pack, inputs))

    def _layers(self, inputs: dict[str, Any]) -> Tensor:
        with computing_in(self._dtype, self._device):
            hidden_1th: Tensor = self._network(**inputs).last_hidden_state
        return hidden_1th
