"""Samples from weights that are a given number of versions old, in this process: staleness without timing.

Promises:

- `groups_at(version)` are sampled by the weights of version `max(0, version - lag)`, every token of them.
- Prompts, seeds and group names are those that a run with this configuration would submit for that step, so a sample
  depends on the configuration and the sampling weights alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.rewards import RewardItem
from services.generator.engine.engine import GenerateRequest, SamplingSettings
from services.generator.engines.transformers.batch_decoder import BatchDecoder, Row
from services.reward.models.exact_match import exact_match
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.config import TrainingConfig
from services.trainer.data.prompt_order import (
    EncodedPrompt,
    load_prompts,
    sampling_seed,
    training_group_id,
)
from services.trainer.data.row_order import RowOrder
from services.trainer.data.tokenizer import HuggingFaceTokenizer

Score = Callable[[RewardItem], float]
HELD_OUT_SEED = 2**40
"""First seed of held-out samples: the same for all runs, so that they differ only by their weights."""


class LaggingSampler:
    """Samples and scores training groups for one run.

    Args:
        config: Configuration of the run; its data, sampling, group size and seed are used.
        lag: Age of samples in versions, once there are that many.
        score: Reward of a completion.
    """

    def __init__(self, config: TrainingConfig, *, lag: int, score: Score = exact_match) -> None:
        assert isinstance(config.data.train, Path)
        self._config = config
        self._score_item = score
        prompts = load_prompts(
            config.data.train,
            HuggingFaceTokenizer(config.model.folder),
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        self._prompts = prompts.prompts
        self._order = RowOrder(len(self._prompts), seed=(config.run.seed,), shuffle=config.data.shuffle)
        self._tokenizer = AutoTokenizer.from_pretrained(config.model.folder, local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(
            config.model.folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self._kept: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)

    def note_version(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Add a version with a copy of these weights."""
        self._kept.append((version, {name: tensor.clone() for name, tensor in tensors.items()}))

    def groups_at(self, version: int) -> list[list[TrainingSample]]:
        """The groups that the step from `version` trains on, in the order of their prompts."""
        sampled_by, tensors = self._kept[0]
        self._model.load_state_dict(tensors, strict=False)
        per_step = self._config.algorithm.prompts_per_step
        positions = range(version * per_step, (version + 1) * per_step)
        rows = {position: self._rows(position) for position in positions}
        decode(self._model, [row for siblings in rows.values() for row in siblings])
        return [
            [self._sample(position, index, row, sampled_by) for index, row in enumerate(siblings)]
            for position, siblings in rows.items()
        ]

    def held_out_reward(self, tensors: Mapping[str, Tensor]) -> float:
        """Mean reward of one sample of each held-out prompt under these weights."""
        config = self._config
        assert isinstance(config.data.eval, Path)
        self._model.load_state_dict(tensors, strict=False)
        tokenizer = HuggingFaceTokenizer(config.model.folder)
        held_out = load_prompts(config.data.eval, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
        prompts = held_out.prompts[: config.run.num_eval_prompts]
        rows = [
            make_row(prompt.token_ids, self._sampling(HELD_OUT_SEED + index)) for index, prompt in enumerate(prompts)
        ]
        decode(self._model, rows)
        return float(np.mean([self._score(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]))

    def _prompt(self, position: int) -> EncodedPrompt:
        return self._prompts[self._order.row(*divmod(position, len(self._prompts)))]

    def _rows(self, position: int) -> list[Row]:
        prompt, config = self._prompt(position), self._config
        seed = sampling_seed(config.run.seed, position)
        return [
            make_row(prompt.token_ids, self._sampling(seed + index)) for index in range(config.algorithm.group_size)
        ]

    def _sampling(self, seed: int) -> SamplingSettings:
        sampling = self._config.sampling
        return SamplingSettings(
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            seed=seed,
            stop_token_ids=(self._tokenizer.eos_token_id,),
        )

    def _sample(self, position: int, index: int, row: Row, version: int) -> TrainingSample:
        prompt = self._prompt(position)
        return TrainingSample(
            group_id=training_group_id(position),
            sample_index=index,
            prompt_token_ids=np.asarray(prompt.token_ids, np.int32),
            completion_token_ids=np.asarray(row.new_token_ids, np.int32),
            behavior_logprobs=np.asarray(row.new_logprobs, np.float32),
            policy_versions=np.full(len(row.new_token_ids), version, np.int64),
            temperature=self._config.sampling.temperature,
            reward=self._score(prompt, row),
        )

    def _score(self, prompt: EncodedPrompt, row: Row) -> float:
        text = self._tokenizer.decode(row.new_token_ids, skip_special_tokens=True)
        return self._score_item(RewardItem(completion=text, answer=prompt.row.answer))


def make_row(prompt_token_ids: Sequence[int], sampling: SamplingSettings) -> Row:
    """A sample to decode."""
    request = GenerateRequest(request_id="sample", prompt_token_ids=tuple(prompt_token_ids), sampling=sampling)
    return Row.of(request, num_left=sampling.max_new_tokens)


def decode(model: torch.nn.Module, rows: Sequence[Row]) -> None:
    """Decode all rows to their ends, as one batch."""
    decoder = BatchDecoder(model, seed=0)
    decoder.join(rows)
    while decoder.rows:
        decoder.step()
