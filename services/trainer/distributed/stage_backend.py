"""One process' part of the backend when the model is cut into stages: a pipeline of microbatches (GPipe).

A pack is given to all stages of a pipeline, each of which divides it into the same microbatches of whole trajectories.
All of them pass forward through the stages one after another, then all of them backward, so that the stages work on
different ones at the same time. Losses are sums over tokens: the gradient is that of the whole pack.

Source: Huang et al., GPipe (arXiv 1811.06965).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.algorithms.loss import LossOutputs
from services.trainer.batches.packing import Pack, divide
from services.trainer.distributed.process_group import RankGroup
from services.trainer.distributed.rank_backend import RankBackend, totals_of
from services.trainer.model.attention import packed_inputs
from services.trainer.model.backend import LossTotals, NonFiniteLossError, Quantity, StepMetrics
from services.trainer.model.precision import MASTER, computing_in
from services.trainer.model_state.weight_file import Part

MICROBATCHES_PER_STAGE = 4
"""At most: then the stages wait for each other a fifth of the time at most (GPipe, section 2)."""


class StageBackend(RankBackend):
    """A `Backend` whose model is one stage; its packs and results are those of the whole pipeline."""

    _ranks: RankGroup

    def __init__(self, **settings: Any) -> None:
        self._sent: list[tuple[Any, Tensor]] = []
        """What is on its way to other stages, which must not be freed."""
        super().__init__(**settings)

    @property
    def vocab_size(self) -> int:
        """As the configuration states it: most stages have no embedding."""
        return int(self._model.config.vocab_size)

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """Adds the gradient of the pipeline's pack to this stage's; the last stage returns the totals."""
        (given,) = packs
        is_idle = given is None or given.num_loss_tokens == 0
        microbatches = self._microbatches(self._idle_pack if given is None or is_idle else given)
        # In all stages, and before they depend on each other for the policy's own pass.
        references = [self._reference_of_loss(each) for each in microbatches]
        outputs = [self._forward(each, reference) for each, reference in zip(microbatches, references, strict=True)]
        totals, loss = LossTotals(), 0.0
        if self._ranks.stage.is_last:
            for each, (_, found) in zip(microbatches, outputs, strict=True):
                assert isinstance(found, LossOutputs)
                more, reported = totals_of(found, num_tokens=each.num_loss_tokens)
                loss, totals = loss + more, totals.merged(reported)
        self._settle()
        is_finite = math.isfinite(loss)
        if not self._ranks.agree(is_finite):
            where = "another process" if is_finite else "a pack"
            raise NonFiniteLossError(f"the loss of {where} is {'not finite' if is_finite else loss}")
        for number, (received, found) in enumerate(outputs, 1):
            self._backward(received, found, is_idle=is_idle, is_last=number == len(outputs))
        self._settle()
        return LossTotals() if is_idle else totals

    def score(self, *packs: Pack | None, quantity: Quantity) -> list[npt.NDArray[np.float32]]:
        """One pass of the pipeline; the numbers are known in its last stage, and zeros in the others."""
        (given,) = packs
        parts: list[Pack | None] = [None] if given is None else [*self._microbatches(given)]
        found = [super(StageBackend, self).score(part, quantity=quantity)[0] for part in parts]
        self._settle()
        return [np.concatenate(found)]

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        """As always, once both ends of the pipeline have the gradient of embeddings that they share."""
        for name in sorted(self._ranks.stage.shared & self._learner.parameters.keys()):
            gradient = self._learner.parameters[name].grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=self._ranks.ends)
        return super().optimizer_step(divisor=divisor, is_last=is_last)

    def _microbatches(self, pack: Pack) -> list[Pack]:
        return divide(pack, MICROBATCHES_PER_STAGE * self._ranks.num_stages)

    def _forward(self, pack: Pack, reference: Tensor | None) -> tuple[Tensor | None, Tensor | LossOutputs]:
        """What this stage received, and made of it: the loss, or the next stage's input."""
        received = self._received(pack.num_tokens)
        found = self._passed(self._model, pack, received)
        return received, self._loss_of(pack, found, reference) if self._ranks.stage.is_last else found

    def _backward(self, received: Tensor | None, found: Tensor | LossOutputs, *, is_idle: bool, is_last: bool) -> None:
        # Gradients are summed over copies of the stage once a pack: they may have different numbers of microbatches.
        self._model.set_is_last_backward(is_last)
        self._model.set_requires_gradient_sync(is_last)
        if isinstance(found, LossOutputs):
            (found.loss * 0.0 if is_idle else found.loss).backward()
        else:
            gradient = torch.empty_like(found)
            dist.recv(gradient, self._ranks.rank_of_stage(self._ranks.stage.index + 1))
            found.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self._ranks.stage.index - 1)

    def _logprobs(self, model: Any, pack: Pack) -> Tensor:
        """A forward pass of one microbatch; float32[N], zeros in all stages but the last."""
        found = self._passed(model, pack, self._received(pack.num_tokens))
        return found if self._ranks.stage.is_last else torch.zeros(pack.num_loss_tokens, device=self._device)

    def _passed(self, model: Any, pack: Pack, received: Tensor | None) -> Tensor:
        """This stage's pass: log-probs, float32[N], or hidden states, float32[1, T, H], which are sent on."""
        if self._ranks.stage.is_last:
            return self._logprobs_of(model, pack, self._inputs(pack, received))
        with computing_in(self._dtype, self._device):
            inputs = self._inputs(pack, received)
            hidden_1th: Tensor = model(**inputs).logits
        self._send(hidden_1th.detach(), self._ranks.stage.index + 1)
        return hidden_1th

    def _inputs(self, pack: Pack, hidden_1th: Tensor | None = None) -> dict[str, Any]:
        """The model's arguments; without hidden states, which only a first stage does not need, zeros."""
        inputs = packed_inputs(pack, self._device)
        if not self._ranks.stage.is_first:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = self._blank(pack.num_tokens).zero_() if hidden_1th is None else hidden_1th
        return inputs

    def _received(self, num_tokens: int) -> Tensor | None:
        if self._ranks.stage.is_first:
            return None
        hidden_1th = self._blank(num_tokens)
        dist.recv(hidden_1th, self._ranks.rank_of_stage(self._ranks.stage.index - 1))
        return hidden_1th.requires_grad_(torch.is_grad_enabled())

    def _blank(self, num_tokens: int) -> Tensor:
        return torch.empty(1, num_tokens, self._model.config.hidden_size, dtype=MASTER, device=self._device)

    def _send(self, tensor: Tensor, stage: int) -> None:
        tensor = tensor.to(MASTER).contiguous()
        self._sent.append((dist.isend(tensor, self._ranks.rank_of_stage(stage)), tensor))

    def _settle(self) -> None:
        """Wait until all has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

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
        elif ranks.rank < ranks.num_stages:
            names = sorted(held.keys() - ranks.copies)
            ranks.send({"names": names}, to=0)
            for name in names:
                dist.send(held[name].cpu().contiguous(), 0)
        return held
