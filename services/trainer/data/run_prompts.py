"""Loads a run's prompts: training and held-out rows of the configured sources."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config import ConfigError
from penstock.storage.fetched import fetched
from services.trainer.config import TrainingConfig
from services.trainer.data.prompt_mixture import PromptMixture, PromptSource
from services.trainer.data.prompt_order import PromptSet, Tokenizer, load_prompts
from services.trainer.data_config import EvalSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrompts:
    """Training and held-out prompts, by source."""

    train: tuple[PromptSource, ...]
    """Submitted by the run; empty if its groups come from others."""
    held_out: tuple[PromptSource, ...]
    """Used for measurements; may be empty."""
    num_skipped: int
    """Rows left out because their prompt is too long."""

    def mixture(self, config: TrainingConfig) -> PromptMixture | None:
        """The training prompts in order; None if the run submits none."""
        return PromptMixture(self.train, config.data, seed=config.run.seed) if self.train else None


def load_run_prompts(config: TrainingConfig, tokenizer: Tokenizer, max_sequence_length: int) -> RunPrompts:
    """Read and tokenise a run's prompts, for a model with that context.

    Raises:
        ConfigError: A file cannot be used, or completions leave no space for a prompt.
    """
    longest = max_sequence_length - config.sampling.max_new_tokens
    if longest < 1:
        raise ConfigError(
            f"sampling.max_new_tokens: {config.sampling.max_new_tokens} leaves no room for a prompt in the model's "
            f"context of {max_sequence_length} tokens; lower it"
        )
    limit = min(config.data.max_prompt_tokens, longest)
    files: dict[str, PromptSet] = {}

    def load(field: str, source: EvalSource, *, most: int | None = None) -> PromptSource:
        key = f"{field} ({source.name})" if source.name else field
        files[key] = found = load_prompts(fetched(key, source.path), tokenizer, max_prompt_tokens=limit)
        return PromptSource(
            name=source.name,
            prompts=found.prompts[:most],
            group_size=config.algorithm.group_size,
            max_new_tokens=source.max_new_tokens or config.sampling.max_new_tokens,
        )

    train = tuple(
        replace(
            load("data.train", source),
            weight=source.weight,
            group_size=source.group_size or config.algorithm.group_size,
        )
        for source in config.data.train_sources
    )
    most = config.run.num_eval_prompts
    held_out = tuple(load("data.eval", source, most=most) for source in config.data.eval_sources if most)
    return RunPrompts(train=train, held_out=held_out, num_skipped=sum(each.num_skipped for each in files.values()))
