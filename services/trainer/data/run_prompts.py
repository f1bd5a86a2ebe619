"""Loads a run's prompts: training and held-out rows of the configured sources."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import ConfigError
from penstock.reasoning_gym.source import EVALUATION_SEED, ReasoningGymSource
from penstock.storage.addresses import Address
from penstock.storage.fetched import fetched
from services.trainer.config import TrainingConfig
from services.trainer.data.drawn_prompts import DrawnPrompts
from services.trainer.data.prompt_mixture import PromptMixture, PromptSource
from services.trainer.data.prompt_order import EncodedPrompt, PromptRows, Tokenizer, load_prompts
from services.trainer.data.row_digests import rows_digest
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

    @property
    def held_out_digests(self) -> dict[str, str]:
        """SHA-256 of the files of held-out rows, by source."""
        return {source.name: source.digest for source in self.held_out if source.digest}

    def mixture(self, config: TrainingConfig) -> PromptMixture | None:
        """The training prompts in order; None if the run submits none."""
        return PromptMixture(self.train, config.data, seed=config.run.seed) if self.train else None


def load_run_prompts(config: TrainingConfig, tokenizer: Tokenizer, max_sequence_length: int) -> RunPrompts:
    """Read and tokenise a run's prompts, for a model with that context.

    Raises:
        ConfigError: A file or a task cannot be used, or completions leave no space for a prompt.
    """
    longest = max_sequence_length - config.sampling.max_new_tokens
    if longest < 1:
        raise ConfigError(
            f"sampling.max_new_tokens: {config.sampling.max_new_tokens} leaves no room for a prompt in the model's "
            f"context of {max_sequence_length} tokens; lower it"
        )
    loader = _Loader(tokenizer, limit=min(config.data.max_prompt_tokens, longest))

    def loaded(source: EvalSource, prompts: PromptRows) -> PromptSource:
        return PromptSource(
            name=source.name,
            prompts=prompts,
            group_size=config.algorithm.group_size,
            max_new_tokens=source.max_new_tokens or config.sampling.max_new_tokens,
        )

    train = tuple(
        replace(
            loaded(source, loader.train(source)),
            weight=source.weight,
            group_size=source.group_size or config.algorithm.group_size,
            digest=_digest("data.train", source),
        )
        for source in config.data.train_sources
    )
    most = config.run.num_eval_prompts
    held_out = tuple(
        replace(loaded(source, loader.held_out(source, most)), digest=_digest("data.eval", source))
        for source in config.data.eval_sources
        if most
    )
    return RunPrompts(train=train, held_out=held_out, num_skipped=loader.num_skipped)


class _Loader:
    """Loads the rows of sources, from files or tasks."""

    def __init__(self, tokenizer: Tokenizer, *, limit: int) -> None:
        self.num_skipped = 0
        self._tokenizer = tokenizer
        self._limit = limit

    def train(self, source: EvalSource) -> PromptRows:
        """Training rows."""
        field = _field("data.train", source)
        if not isinstance(source.path, ReasoningGymSource):
            return self._file(field, source.path)
        drawn = DrawnPrompts(field, source.path, self._tokenizer, max_prompt_tokens=self._limit)
        drawn.load([0])
        return drawn

    def held_out(self, source: EvalSource, most: int) -> PromptRows:
        """The first `most` held-out rows."""
        field = _field("data.eval", source)
        if not isinstance(source.path, ReasoningGymSource):
            return self._file(field, source.path)[:most]
        drawn = DrawnPrompts(
            field, source.path, self._tokenizer, max_prompt_tokens=self._limit, default_seed=EVALUATION_SEED
        )
        with closing(drawn):
            indices = range(min(most, len(drawn)))
            drawn.load(indices)
            return tuple(drawn[index] for index in indices)

    def _file(self, field: str, rows: Path | Address) -> tuple[EncodedPrompt, ...]:
        found = load_prompts(fetched(field, rows), self._tokenizer, max_prompt_tokens=self._limit)
        self.num_skipped += found.num_skipped
        return found.prompts


def _digest(section: str, source: EvalSource) -> str:
    """SHA-256 of its file, hex; empty if its rows are drawn."""
    if isinstance(source.path, ReasoningGymSource):
        return ""
    return rows_digest(fetched(_field(section, source), source.path))


def _field(section: str, source: EvalSource) -> str:
    return f"{section} ({source.name})" if source.name else section
