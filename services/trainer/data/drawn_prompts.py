"""Prompts that are drawn when they are needed, from a task of reasoning_gym.

Promises, beside those of `services.trainer.data.prompt_order`:

- The prompt at a position depends only on the source, the run's seed and the position: nothing is kept in checkpoints.
- A prompt that is longer than `max_prompt_tokens` is replaced by another row of the task, always the same one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import structlog

from penstock.reasoning_gym.rows import DrawnRow, RowDrawer
from penstock.reasoning_gym.source import MAX_ROWS, ReasoningGymSource
from services.trainer.data.prompt_order import EncodedPrompt, Tokenizer, encoded
from services.trainer.data.prompt_rows import DataError, Message, Row

MAX_REPLACEMENTS = 63
_STRIDE = MAX_ROWS // (MAX_REPLACEMENTS + 1)
"""Distance of a row to its replacements: beyond what a run trains on."""
KEPT_PROMPTS = 4096

_log = structlog.get_logger()


class DrawnPrompts:
    """Rows by their index. Raises ConfigError: the package is missing."""

    def __init__(
        self,
        field: str,
        source: ReasoningGymSource,
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int,
        default_seed: int = 0,
    ) -> None:
        self.source = source
        self._field = field
        self._tokenizer = tokenizer
        self._limit = max_prompt_tokens
        self._drawer = RowDrawer(field, source, default_seed=default_seed)
        self._kept: OrderedDict[int, EncodedPrompt] = OrderedDict()
        self._num_replaced = 0

    def load(self, indices: Sequence[int]) -> None:
        """Draw the rows that are not kept; blocks meanwhile. Raises ConfigError."""
        missing = [index for index in dict.fromkeys(indices) if index not in self._kept]
        for index in indices:
            if index in self._kept:
                self._kept.move_to_end(index)
        for step in range(MAX_REPLACEMENTS + 1):
            rows = [self._row(drawn) for drawn in self._drawer.draw([index + step * _STRIDE for index in missing])]
            lengths = {}
            for index, row, token_ids in zip(missing, rows, encoded(rows, self._tokenizer), strict=True):
                lengths[index] = len(token_ids)
                if 1 <= len(token_ids) <= self._limit:
                    self._kept[index] = EncodedPrompt(row=row, token_ids=tuple(token_ids), row_number=index)
            missing = [index for index in missing if index not in self._kept]
            if not missing:
                break
            if not self._num_replaced:
                _log.warning("prompts are too long and are replaced", source=str(self.source), limit=self._limit)
            self._num_replaced += len(missing)
        else:
            raise DataError(
                f"{self._field}: {self.source}: {MAX_REPLACEMENTS + 1} rows in a row are longer than "
                f"data.max_prompt_tokens = {self._limit} tokens (the last has {lengths[missing[0]]}); raise the limit, "
                "or lower the level"
            )
        while len(self._kept) > max(KEPT_PROMPTS, len(indices)):
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        return self.source.size or _STRIDE

    def __getitem__(self, index: int, /) -> EncodedPrompt:
        """A row, drawn if it is not kept."""
        if index not in self._kept:
            self.load([index])
        return self._kept[index]

    def close(self) -> None:
        """End what draws."""
        self._drawer.close()

    def _row(self, drawn: DrawnRow) -> Row:
        prompt: str | tuple[Message, ...] = drawn.question
        if self.source.chat:
            system = [Message(role="system", content=self.source.system)] if self.source.system else []
            prompt = (*system, Message(role="user", content=drawn.question))
        return Row(prompt=prompt, answer=drawn.answer, metadata_json=drawn.spec_json)
