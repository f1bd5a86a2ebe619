"""One process' part of the backend when the model is cut into stages: a pipeline of microbatches (`stage_link`).

Losses are sums over tokens: the gradient of a pack's microbatches is that of the whole pack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.batches.packing import Pack
from services.trainer.distributed.process_group import RankGroup
from services.trainer.distributed.rank_backend import RankBackend, totals_of
from services.trainer.distributed.stage_critic import StageCritic
from services.trainer.distributed.stage_link import StageLink
from services.trainer.model.backend import LossTotals, NonFiniteLossError, Quantity, StepMetrics
from services.trainer.model.precision import computing_in
from services.trainer.model_state.weight_file import Part


class StageBackend(RankBackend):
    """A `Backend` whose model is one stage; its packs and results are those of the whole pipeline."""

    _ranks: RankGroup
    _critic: StageCritic | None

    @cached_property
    def _link(self) -> StageLink:
        """To the other stages, known once the model is."""
        return StageLink(self._ranks, hidden=self._model.config.hidden_size, device=self._device)

    @property
    def vocab_size(self) -> int:
        """As the configuration states it: most stages have no embedding."""
        return int(self._model.config.vocab_size)

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """Adds the gradient of the pipeline's pack to this stage's; the last stage returns the totals."""
        (given,) = packs
        is_idle = given is None or given.num_loss_tokens == 0
        pack = self._idle_pack if given is None or is_idle else given
        microbatches = self._link.microbatches(pack)
        # In all stages, and before they depend on each other for the policy's own pass.
        # Below an adapter the reference is the model itself.
        with self._link.gathered(self._trained.networks[1:] or self._trained.networks):
            references = [self._reference_of_loss(each) for each in microbatches]
        with self._link.gathered([self._model]):
            return self._passes(pack, microbatches, references, is_idle=is_idle)

    def _passes(
        self, pack: Pack, microbatches: Sequence[Pack], references: Sequence[Tensor | None], *, is_idle: bool
    ) -> LossTotals:
        """Forward, then backward, as `forward_backward` says."""
        outputs = [self._passed(self._model, each) for each in microbatches]
        totals, loss = LossTotals(), 0.0
        if self._link.is_last:
            of_pack = np.concatenate([logprobs.detach().cpu().numpy() for _, logprobs in outputs])
            totals = LossTotals(logprobs=(of_pack,))
            for number, (received, logprobs) in enumerate(outputs):
                found = self._loss_of(microbatches[number], logprobs, references[number])
                more, reported = totals_of(found, num_tokens=microbatches[number].num_loss_tokens)
                loss, totals = loss + more, totals.merged(reported)
                outputs[number] = received, found.loss * 0.0 if is_idle else found.loss
        self._link.settle()
        is_finite = math.isfinite(loss)
        if not self._ranks.agree(is_finite):
            where = "another process" if is_finite else "a pack"
            raise NonFiniteLossError(f"the loss of {where} is {'not finite' if is_finite else loss}")
        if self._critic is not None and pack.returns is not None:
            value_loss = self._critic.forward_backward(pack, is_idle=is_idle)
            if self._link.is_last:
                totals = totals.merged(LossTotals(sums={"value_loss": value_loss}))
        for number, (received, found_here) in enumerate(outputs, 1):
            self._link.backward([self._model], received, found_here, is_last=number == len(outputs))
        self._link.settle()
        return LossTotals() if is_idle else totals

    def score(self, *packs: Pack | None, quantity: Quantity) -> list[npt.NDArray[np.float32]]:
        """One pass of the pipeline; the numbers are known in its last stage, and zeros in the others."""
        (given,) = packs
        parts: list[Pack | None] = [None] if given is None else [*self._link.microbatches(given)]
        critic = [] if self._critic is None else self._critic.modules
        with self._link.gathered([*self._trained.networks, *critic]):
            found = [super(StageBackend, self).score(part, quantity=quantity)[0] for part in parts]
            self._link.settle()
        return [np.concatenate(found)]

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        """As always, once both ends of the pipeline have the gradient of embeddings that they share."""
        for name in sorted(self._ranks.stage.shared & self._learner.parameters.keys()):
            gradient = self._learner.parameters[name].grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=self._ranks.ends)
        return super().optimizer_step(divisor=divisor, is_last=is_last)

    def _logprobs(self, model: Any, pack: Pack) -> Tensor:
        """A forward pass of one microbatch; float32[N], zeros in all stages but the last."""
        _, found = self._passed(model, pack)
        return found if self._link.is_last else torch.zeros(pack.num_loss_tokens, device=self._device)

    def _passed(self, model: Any, pack: Pack) -> tuple[Tensor | None, Tensor]:
        """This stage's pass: what it received, and log-probs, float32[N], or hidden states, float32[1, T, H]."""

        def layers(inputs: dict[str, Any]) -> Tensor:
            with computing_in(self._dtype, self._device):
                hidden_1th: Tensor = model(**inputs).logits
            return hidden_1th

        return self._link.passed(pack, layers=layers, end=lambda inputs: self._logprobs_of(model, pack, inputs))

    def _inputs(self, pack: Pack) -> dict[str, Any]:
        return self._link.inputs(pack)

    def _new_critic(self, *args: Any, **settings: Any) -> StageCritic:
        return StageCritic(*args, link=self._link, **settings)

    def _parts(self, tensors: Any) -> dict[str, Part]:
        """Nothing of the tensors that other stages write, which every process must name."""
        parts = super()._parts(tensors)
        absent = {name: self._absent_part(tensor) for name, tensor in self._elsewhere.items()}
        copies = {name: self._absent_part(tensors[name]) for name in self._ranks.copies & tensors.keys()}
        return parts | absent | copies

    def _absent_part(self, tensor: Tensor) -> Part:
        published = self._trained.published_dtype
        dtype = published if published is not None and tensor.is_floating_point() else tensor.dtype
        return Part(shape=tuple(tensor.shape), dtype=dtype, begin=0, stride=0, elements=torch.empty(0, 0, dtype=dtype))

    def state_tensors(self) -> dict[str, Tensor]:
        """All stages' weights, whole in process 0."""
        held, ranks = super().state_tensors(), self._ranks
        if ranks.rank == 0:
            for sender in map(ranks.rank_of_stage, range(1, ranks.num_stages)):
                call, _ = ranks.receive(sender=sender)
                for name in call["names"]:
                    part = self._absent_part(self._elsewhere[name])
                    held[name] = torch.empty(part.shape, dtype=part.dtype)
                    dist.recv(held[name], sender)
        elif ranks.leads_stage:
            names = sorted(held.keys() - ranks.copies)
            ranks.send({"names": names}, to=0)
            for name in names:
                dist.send(held[name].cpu().contiguous(), 0)
        return held
