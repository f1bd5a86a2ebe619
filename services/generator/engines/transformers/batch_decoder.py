"""Decodes batches with a plain Hugging Face causal LM: one forward pass and one token per sample in each step.

Pure computation, no threads. Promises:

- `step` computes logits and samples from them at once, so each token belongs to the weights loaded at that step.
- A joining sample makes the whole batch prefill again, decoded tokens included; a leaving one drops its row of the KV
  cache: recomputing costs arithmetic but avoids merging caches of unequal length.
- Random numbers come from the sample's own generator if it has a seed, else from the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.wire.routes import Routes
from services.generator.engine.engine import FinishReason, GenerateRequest, SamplingSettings
from services.generator.engines.transformers.route_recorder import RouteRecorder


@dataclass(slots=True, kw_only=True)
class Row:
    """A sample being decoded."""

    request_id: str
    token_ids: list[int]
    """Prompt and completion so far."""
    num_left: int
    """Maximum number of further tokens."""
    sampling: SamplingSettings
    generator: torch.Generator | None = None
    new_token_ids: list[int] = field(default_factory=list)
    """Tokens decoded but not yet collected."""
    new_logprobs: list[float] = field(default_factory=list)
    """Log-probs in nats, aligned with `new_token_ids`."""
    num_decoded: int = 0
    """Tokens decoded here."""
    finish_reason: FinishReason | None = None
    has_routes: bool = False
    """Whether its routes are recorded."""
    has_prompt_routes: bool = False
    """Whether those of its first positions are, too, before its first token."""
    new_routes: list[Routes] = field(default_factory=list)
    """Rows not yet collected, those of `new_token_ids`, perhaps after those of the prompt."""

    @classmethod
    def of(cls, request: GenerateRequest, *, num_left: int) -> Row:
        """The row that continues a request."""
        seed = request.sampling.seed_after(len(request.prefix_token_ids))
        return cls(
            request_id=request.request_id,
            token_ids=[*request.prompt_token_ids, *request.prefix_token_ids],
            num_left=num_left,
            sampling=request.sampling,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            has_routes=request.has_routes,
            has_prompt_routes=not request.prefix_token_ids,
        )

    def append(self, token_id: int, logprob: float) -> None:
        """Appends the next token."""
        self.token_ids.append(token_id)
        self.new_token_ids.append(token_id)
        self.new_logprobs.append(logprob)
        self.num_left -= 1
        self.num_decoded += 1
        if token_id in self.sampling.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.num_left == 0:
            self.finish_reason = FinishReason.LENGTH


class BatchDecoder:
    """Decodes one batch on the CPU; axes in names below: b rows, t cached positions, v vocabulary."""

    def __init__(self, model: Any, *, seed: int, recorder: RouteRecorder | None = None) -> None:
        self._model = model
        self._recorder = recorder
        self._generator = torch.Generator().manual_seed(seed)
        self._cache: Any = None
        self._mask_bt = torch.zeros(0, 0, dtype=torch.long)
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row]) -> None:
        """Adds rows; the next step prefills the whole batch again."""
        self.rows.extend(rows)
        self._cache = None

    def drop_cache(self) -> int:
        """Makes the next step recompute the whole KV cache; returns its number of tokens."""
        self._cache = None
        return sum(len(row.token_ids) - 1 for row in self.rows if row.num_decoded)

    def step(self) -> list[Row]:
        """Decodes one token for every row; returns the rows, finished ones included, and drops those from the batch."""
        with torch.inference_mode():
            logits_bv = self._prefill() if self._cache is None else self._forward_last()
            token_ids, logprobs = sample_tokens(logits_bv, self.rows, self._generator)
        for row, token_id, logprob in zip(self.rows, token_ids, logprobs, strict=True):
            row.append(token_id, logprob)
        stepped = self.rows
        self._keep([row.finish_reason is None for row in stepped])
        return stepped

    def remove(self, request_id: str) -> Row | None:
        """Takes a row out of the batch."""
        found = next((row for row in self.rows if row.request_id == request_id), None)
        if found is not None:
            self._keep([row is not found for row in self.rows])
        return found

    def _keep(self, keep: list[bool]) -> None:
        if all(keep):
            return
        self.rows = [row for row, is_kept in zip(self.rows, keep, strict=True) if is_kept]
        if not self.rows:
            self._cache = None
        elif self._cache is not None:
            indices = torch.tensor([index for index, is_kept in enumerate(keep) if is_kept])
            self._mask_bt = self._mask_bt[indices]
            self._cache.batch_select_indices(indices)

    def _prefill(self) -> torch.Tensor:
        longest = max(len(row.token_ids) for row in self.rows)
        ids_bt = torch.zeros(len(self.rows), longest, dtype=torch.long)
        self._mask_bt = torch.zeros(len(self.rows), longest, dtype=torch.long)
        for index, row in enumerate(self.rows):
            ids_bt[index, longest - len(row.token_ids) :] = torch.tensor(row.token_ids)
            self._mask_bt[index, longest - len(row.token_ids) :] = 1
        positions_bt = (self._mask_bt.cumsum(dim=1) - 1).clamp(min=0)
        return self._forward(ids_bt, positions_bt)

    def _forward_last(self) -> torch.Tensor:
        ids_b1 = torch.tensor([[row.token_ids[-1]] for row in self.rows])
        positions_b1 = torch.tensor([[len(row.token_ids) - 1] for row in self.rows])
        self._mask_bt = torch.cat([self._mask_bt, torch.ones(len(self.rows), 1, dtype=torch.long)], dim=1)
        return self._forward(ids_b1, positions_b1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask_bt,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        if self._recorder is not None:
            self._note_routes(self._recorder.take(len(self.rows)))
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _note_routes(self, routes_btlk: Routes) -> None:
        """Notes the experts of the positions that are sampled from, and of a new sample's prompt."""
        for row, routes_tlk in zip(self.rows, routes_btlk, strict=True):
            if row.has_routes:
                # Rows are padded on the left, and what was decoded has its routes already.
                is_new = row.has_prompt_routes and not row.num_decoded
                row.new_routes.append(routes_tlk[-len(row.token_ids) :] if is_new else routes_tlk[-1:])


def sample_tokens(
    logits_bv: torch.Tensor, rows: Sequence[Row], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """Draws one token for each row.

    Returns:
        Token ids [b] and their log-probs [b] in nats, under the distribution each was drawn from (temperature, top-k
        and top-p applied; for greedy rows, the unmodified one).

    Source: the exponential race (argmax of p / e with e ~ Exp(1) is distributed as p), as vLLM samples.
    """
    temperatures_b1 = torch.tensor([[row.sampling.temperature or 1.0] for row in rows])
    logprobs_bv = truncate(logits_bv / temperatures_b1, [row.sampling for row in rows]).log_softmax(dim=-1)
    noise_bv = torch.empty_like(logprobs_bv).exponential_(generator=generator)
    for index, row in enumerate(rows):
        if row.generator is not None:
            noise_bv[index].exponential_(generator=row.generator)
        if row.sampling.temperature == 0:
            noise_bv[index] = 1.0
    token_ids_b = (logprobs_bv.exp() / noise_bv).argmax(dim=-1)
    sampled_b = logprobs_bv.gather(1, token_ids_b.unsqueeze(1)).squeeze(1)
    return token_ids_b.tolist(), sampled_b.tolist()


def truncate(logits_bv: torch.Tensor, settings: Sequence[SamplingSettings]) -> torch.Tensor:
    """Sets tokens excluded by top-k, then top-p, to minus infinity; greedy rows are unchanged."""
    for index, sampling in enumerate(settings):
        if sampling.temperature == 0 or (sampling.top_k is None and sampling.top_p >= 1.0):
            continue
        ordered_v, order_v = logits_bv[index].sort(descending=True)
        if sampling.top_k is not None:
            ordered_v[sampling.top_k :] = -torch.inf
        before_v = ordered_v.softmax(dim=-1).cumsum(dim=-1) - ordered_v.softmax(dim=-1)
        # The most likely token is always kept.
        is_excluded_v = (before_v >= sampling.top_p) & (torch.arange(len(order_v)) > 0)
        ordered_v[is_excluded_v] = -torch.inf
        logits_bv[index, order_v] = ordered_v
    return logits_bv
