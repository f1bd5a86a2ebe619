"""Loads a run's prompts: training and held-out rows of the configured files."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ConfigError
from services.trainer.config import TrainingConfig
from services.trainer.data.prompt_order import EncodedPrompt, PromptSet, Tokenizer, load_prompts

_NONE = PromptSet(prompts=(), num_skipped=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrompts:
    """Training and held-out prompts."""

    train: tuple[EncodedPrompt, ...]
    """Submitted by the run; empty if its groups come from others."""
    held_out: tuple[EncodedPrompt, ...]
    """Used for measurements; may be empty."""
    num_skipped: int
    """Rows left out because their prompt is too long."""


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
    train = held_out = _NONE
    if (path := config.data.train_file) is not None:
        train = load_prompts(path, tokenizer, max_prompt_tokens=limit)
    if config.run.num_eval_prompts and (path := config.data.eval_file) is not None:
        held_out = load_prompts(path, tokenizer, max_prompt_tokens=limit)
    return RunPrompts(
        train=train.prompts,
        held_out=held_out.prompts[: config.run.num_eval_prompts],
        num_skipped=train.num_skipped + held_out.num_skipped,
    )
