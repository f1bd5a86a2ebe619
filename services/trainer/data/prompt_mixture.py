"""Chooses the prompts of a run from its sources, in an order that a resumed run continues exactly.

    source by weight (`interleaving`, `curriculum`)  ->  its next row (`row_order`), unless it rests (`difficulty`)

Promises:

- The order depends on configuration, rows, seed and, with a curriculum or difficulty pools, on the steps taken so far
  and what was measured at some of them: never on time or on when a prompt is asked for between two steps.
- `dump` holds all of that: from there a resumed run chooses what the run itself would have chosen.
- A group counts for the row that its own prompt names, whatever an interrupted run may have chosen at its position.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from penstock.wire.source_tag import SourceTag
from services.trainer.data.curriculum import Curriculum
from services.trainer.data.difficulty import MAX_ROWS, DifficultyPool
from services.trainer.data.drawn_prompts import DrawnPrompts
from services.trainer.data.interleaving import Interleaver
from services.trainer.data.prompt_order import EncodedPrompt, PromptRows
from services.trainer.data.prompt_rows import DataError
from services.trainer.data.row_digests import difference
from services.trainer.data.row_order import RowOrder
from services.trainer.data_config import DataConfig

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Rows with the settings of their source."""

    name: str
    """Empty if the run has one source without a name."""
    prompts: PromptRows
    """Its usable rows, however they are read, in the order of `row_number`."""
    group_size: int
    """Samples of each prompt."""
    max_new_tokens: int
    """Maximum number of completion tokens."""
    weight: float = 1.0
    digest: str = ""
    """Of the file with its rows; empty if they are drawn."""

    @property
    def drawn(self) -> DrawnPrompts | None:
        """Its rows, if they are drawn when they are needed."""
        return self.prompts if isinstance(self.prompts, DrawnPrompts) else None


class Choice(NamedTuple):
    """A prompt that was chosen."""

    source: int
    epoch: int
    place: int
    """Among the usable rows of the source."""


class PassedGroup(NamedTuple):
    """A trained group as the order needs it."""

    tag: SourceTag
    pass_rate: float
    """Share of its samples that passed."""


class PromptMixture:
    """Endless training prompts from one or several sources.

    `position` counts prompts chosen since the run began.
    """

    def __init__(self, sources: Sequence[PromptSource], config: DataConfig, *, seed: int) -> None:
        """Raises DataError if there are too many rows for difficulty pools."""
        num_rows = sum(len(source.prompts) for source in sources)
        if config.difficulty is not None and num_rows > MAX_ROWS:
            raise DataError(
                f"data.difficulty: {num_rows} rows, and a checkpoint holds the pools of at most {MAX_ROWS}; use fewer "
                "rows, or leave it out"
            )
        self.position = 0
        self.sources = tuple(sources)
        self._is_tagged = any(source.name for source in sources) or config.difficulty is not None
        self._by_name = {source.name: index for index, source in enumerate(sources)}
        self._interleaver = Interleaver(len(sources))
        self._curriculum = Curriculum(config.curriculum, {source.name: source.weight for source in sources})
        self._orders = [_row_order(source, config, seed) for source in sources]
        self._chosen: dict[int, Choice] = {}
        """By position; of groups that are out, at least."""

    def take(self) -> int:
        """Choose the next prompt; returns its position."""
        position = self.position
        source = self._interleaver.next(self._curriculum.weights())
        self._chosen[position] = Choice(source, *self._orders[source].take())
        self.position += 1
        return position

    def at(self, position: int) -> tuple[PromptSource, EncodedPrompt, SourceTag | None]:
        """The prompt chosen at a position whose group is out, with its source, and the tag that it is to carry."""
        choice = self._choice(position)
        source = self.sources[choice.source]
        prompt = source.prompts[choice.place]
        tag = SourceTag(source=source.name, epoch=choice.epoch, row=prompt.row_number) if self._is_tagged else None
        return source, prompt, tag

    def to_draw(self, positions: Iterable[int]) -> list[tuple[DrawnPrompts, list[int]]]:
        """What has to be drawn before prompts are taken by `at`, which would else block: the rows of each source."""
        rows: dict[int, list[int]] = {}
        for position in positions:
            choice = self._choice(position)
            rows.setdefault(choice.source, []).append(choice.place)
        drawn = [(self.sources[source].drawn, places) for source, places in rows.items()]
        return [(prompts, places) for prompts, places in drawn if prompts is not None]

    def close(self) -> None:
        """End what draws rows."""
        for source in self.sources:
            if source.drawn is not None:
                source.drawn.close()

    def note_step(self, groups: Iterable[PassedGroup], accuracies: Mapping[str, float] | None = None) -> None:
        """Count the groups of a step; those of no source here are ignored.

        Held-out accuracies by source come with the steps that count them.
        """
        rates: dict[str, list[float]] = {source.name: [] for source in self.sources}
        for tag, pass_rate in groups:
            number = self._by_name.get(tag.source)
            if number is None:
                continue
            rates[tag.source].append(pass_rate)
            self._note_visit(number, tag.row, pass_rate)
        if self._curriculum.note_step(rates, accuracies or {}):
            self._interleaver.restart()
            _log.info("a stage of data.curriculum begins", stage=self._curriculum.stage)

    def metrics(self) -> dict[str, float]:
        """Where the order is, by source: share of the next groups, epoch, and rows that rest."""
        weights = self._curriculum.weights()
        line: dict[str, float] = {}
        for source, order, weight in zip(self.sources, self._orders, weights, strict=True):
            if source.name:
                line[f"source/{source.name}/share"] = weight / sum(weights)
                line[f"source/{source.name}/epoch"] = float(order.epoch)
            if order.pool is not None:
                name = f"source/{source.name}/resting_rows" if source.name else "data/resting_rows"
                line[name] = float(order.pool.num_resting(order.epoch))
        return line

    def dump(self, outstanding: Iterable[int]) -> str:
        """The state as text, with what was chosen at the positions of `outstanding` groups; forgets the others."""
        self._chosen = {position: self._chosen[position] for position in outstanding if position in self._chosen}
        sources = {
            source.name: {
                "credit": credit,
                "epoch": order.epoch,
                "offset": order.offset,
                "num_rows": len(source.prompts),
                "digest": source.digest,
                "pool": None if order.pool is None else order.pool.dump(),
            }
            for source, order, credit in zip(self.sources, self._orders, self._interleaver.credits, strict=True)
        }
        chosen = [[position, self.sources[source].name, *rest] for position, (source, *rest) in self._chosen.items()]
        return json.dumps({"sources": sources, "chosen": chosen, "curriculum": self._curriculum.dump()})

    def load(self, state: str | None, *, position: int) -> None:
        """Continue from a state at a position; None is that of a run of one source, which follows from the position.

        Sources that the state does not know begin with their first epoch.

        Raises:
            DataError: The state is of other rows, or of another curriculum.
        """
        self.position = position
        try:
            if state is None:
                if position and len(self.sources) > 1:
                    raise ValueError("the run had one source when it was written; resume with that alone")
                self._orders[0].epoch, self._orders[0].offset = divmod(position, len(self.sources[0].prompts))
                return
            document = json.loads(state)
            self._curriculum.load(document["curriculum"])
            for number, source in enumerate(self.sources):
                if (saved := document["sources"].get(source.name)) is not None:
                    self._load_source(number, saved)
            for chosen_at, name, epoch, place in document["chosen"]:
                if name not in self._by_name:
                    raise ValueError(f"groups of source {name!r} are out, which data.train no longer has; keep it")
                self._chosen[chosen_at] = Choice(self._by_name[name], epoch, place)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise DataError(f"data.train: the order of the checkpoint cannot be continued: {error}") from error

    def _load_source(self, number: int, saved: Mapping[str, Any]) -> None:
        source, order = self.sources[number], self._orders[number]
        if saved["num_rows"] != len(source.prompts):
            raise ValueError(
                f"source {source.name!r} had {saved['num_rows']} usable rows and has {len(source.prompts)} now; resume "
                "with the rows that the run began with"
            )
        # Checkpoints of earlier versions have none.
        if (digest := saved.get("digest", "")) and source.digest and digest != source.digest:
            which = f"source {source.name!r}" if source.name else "its file"
            raise ValueError(difference(which, former=digest, now=source.digest))
        order.epoch, order.offset = saved["epoch"], saved["offset"]
        self._interleaver.credits[number] = saved["credit"]
        if order.pool is not None and saved["pool"] is not None:
            order.pool.load(saved["pool"])

    def _choice(self, position: int) -> Choice:
        return self._chosen.get(position) or self._derived(position)

    def _derived(self, position: int) -> Choice:
        """What was chosen before there were sources: one file, whose rows never rest."""
        epoch, offset = divmod(position, len(self.sources[0].prompts))
        return Choice(0, epoch, self._orders[0].row(epoch, offset))

    def _note_visit(self, number: int, row: int, pass_rate: float) -> None:
        order = self._orders[number]
        if order.pool is None:
            return
        index = _index_of(self.sources[number], row)
        if index is not None:
            order.pool.note(index, pass_rate, epoch=order.epoch)


def _row_order(source: PromptSource, config: DataConfig, seed: int) -> RowOrder:
    num_rows, pool = len(source.prompts), None
    if config.difficulty is not None:
        pool = DifficultyPool(num_rows, config.difficulty)
    # A source's order does not depend on the others'.
    own_seed = (seed, zlib.crc32(source.name.encode())) if source.name else (seed,)

    def say() -> None:
        if not said:
            said.append(source.name)
            _log.warning("all rows of a source rest and come back early", source=source.name, num_rows=num_rows)

    said: list[str] = []
    # Rows without end are in no order that another one could replace.
    shuffle = config.shuffle and (source.drawn is None or source.drawn.source.size is not None)
    return RowOrder(num_rows, seed=own_seed, shuffle=shuffle, pool=pool, on_all_resting=say)


def _index_of(source: PromptSource, row: int) -> int | None:
    """The usable row with that number; None if there is none."""
    prompts = source.prompts
    if source.drawn is not None:
        return row if row < len(prompts) else None
    index = bisect_left(prompts, row, key=lambda prompt: prompt.row_number)
    return index if index < len(prompts) and prompts[index].row_number == row else None
