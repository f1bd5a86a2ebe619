"""What a run's configuration says of its data: rows, or several sources with weights, limits and rewards of their own.

The trainer reads everything but `reward`, which belongs to the reward worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, WrapValidator, model_validator

from penstock.config import StrictModel
from penstock.reasoning_gym.source import ReasoningGymSource, is_source, read_source, reward_of
from penstock.storage.addresses import Address, read_stored
from penstock.wire.source_tag import MAX_NAME_CHARACTERS

MAX_SOURCES = 64
SourceName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME_CHARACTERS - 1}}}$")]
Weight = Annotated[float, Field(ge=0)]
PassRate = Annotated[float, Field(gt=0, le=1)]


def _read_rows(value: Any) -> Path | Address | ReasoningGymSource:
    return read_source(value) or read_stored(value)


Rows = Annotated[
    Path | Address | ReasoningGymSource,
    PlainValidator(_read_rows, json_schema_input_type=str),
    PlainSerializer(lambda rows: rows, return_type=Any),
]
"""A file, its address, or a task of reasoning_gym, whose rows are drawn when they are needed (docs/imports.md)."""


class EvalSource(StrictModel):
    """Held-out rows that are measured by themselves."""

    name: SourceName
    """Its name in metrics and reports; that of a source of `data.train` takes its reward and limits."""
    path: Rows
    """A file, its address, or reasoning_gym:NAME."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of completion tokens, at most sampling.max_new_tokens, which it is when unset."""
    reward: str | dict[str, Any] | list[Any] | None = None
    """What scores it, written as the run's `reward`, which it is when unset; of a task, its own scorer."""

    @model_validator(mode="before")
    @classmethod
    def _tasks_bring_their_scorer(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {**given, "reward": reward_of(given.get("path"), given.get("reward"))}


class TrainSource(EvalSource):
    """One of several sources of training rows."""

    weight: float = Field(default=1.0, gt=0)
    """Its part of the groups, relative to the others'."""
    group_size: int | None = Field(default=None, ge=1)
    """Samples of each prompt, at most algorithm.group_size, which it is when unset."""
    eval: Rows | None = None
    """Held-out rows of this source."""


class DifficultyConfig(StrictModel):
    """Rows rest while all of their samples pass, or all fail."""

    rest_at: tuple[Literal[0, 1], ...] = (0, 1)
    """Pass rates at which a row rests: 0 too difficult, 1 too easy."""
    after: int = Field(default=2, ge=1, le=100)
    """Visits in a row with that pass rate, after which it rests."""
    for_epochs: int = Field(default=1, ge=1, le=1_000_000)
    """Epochs of its source in which it is left out."""


class Stage(StrictModel):
    """A part of a curriculum. It ends by the first of its conditions; the last stage has none."""

    weights: dict[SourceName, Weight]
    """Weights of sources in this stage; sources that are not named keep their own, 0 leaves one out."""
    for_steps: int | None = Field(default=None, ge=1)
    """Steps after which it ends."""
    until_pass_rate: dict[SourceName, PassRate] = Field(default_factory=dict)
    """It ends when these sources pass at least so often, each in the mean of its last 64 groups."""
    until_accuracy: dict[SourceName, PassRate] = Field(default_factory=dict)
    """It ends when these sources have at least this greedy held-out accuracy, which counts when the next measurement
    is due."""
    fades: bool = False
    """Whether weights move linearly to those of the next stage over `for_steps`."""


def _one_or_list(value: Any, one: TypeAdapter[Any], several: TypeAdapter[Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping) and not is_source(value):
        value = [value]
    return (several if isinstance(value, list | tuple) else one).validate_python(value)


_ROWS: TypeAdapter[Any] = TypeAdapter(Rows)
_TRAIN: TypeAdapter[Any] = TypeAdapter(tuple[TrainSource, ...])
_EVAL: TypeAdapter[Any] = TypeAdapter(tuple[EvalSource, ...])


class DataConfig(StrictModel):
    """Prompts: JSONL or parquet with `prompt` (question, problem) and `answer` (label, ground_truth, solution)."""

    train: Annotated[
        tuple[TrainSource, ...] | Rows | None, WrapValidator(lambda value, _: _one_or_list(value, _ROWS, _TRAIN))
    ]
    """Training rows: a file, its address or reasoning_gym:NAME, or a list of sources (docs/data.md); null for a run
    whose groups come from others: agents, a replay."""
    eval: Annotated[
        tuple[EvalSource, ...] | Rows | None, WrapValidator(lambda value, _: _one_or_list(value, _ROWS, _EVAL))
    ] = None
    """Held-out rows, likewise; when unset, nothing is measured."""
    shuffle: bool = True
    """Whether each pass over the data uses a new order."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Rows with longer prompts are skipped, counted and reported."""
    pass_reward: float = 1.0
    """A sample passes with this reward or more: for pass rates by source, difficulty and curriculum."""
    difficulty: DifficultyConfig | None = None
    """Rows that teach nothing rest; null visits every row in every epoch."""
    curriculum: tuple[Stage, ...] = Field(default=(), max_length=64)
    """Stages in which the weights of sources change; none keeps them."""

    @property
    def train_sources(self) -> tuple[TrainSource, ...]:
        """Sources of training rows; a file or task by itself is one without a name."""
        if isinstance(self.train, tuple):
            return self.train
        return () if self.train is None else (TrainSource.model_construct(name="", path=self.train),)

    @property
    def eval_sources(self) -> tuple[EvalSource, ...]:
        """Sources of held-out rows, likewise, those of training sources first."""
        own = [
            EvalSource(name=each.name, path=each.eval, max_new_tokens=each.max_new_tokens, reward=each.reward)
            for each in self.train_sources
            if each.eval is not None
        ]
        if isinstance(self.eval, tuple):
            return (*own, *map(self._with_settings, self.eval))
        return (*own, *([] if self.eval is None else [EvalSource.model_construct(name="", path=self.eval)]))

    def _with_settings(self, source: EvalSource) -> EvalSource:
        """A held-out source with what it takes from the training source of its name."""
        trained = next((each for each in self.train_sources if each.name == source.name), None)
        if trained is None:
            return source
        names = [name for name in ("max_new_tokens", "reward") if getattr(source, name) is None]
        return source.model_copy(update={name: getattr(trained, name) for name in names})

    @property
    def source_names(self) -> tuple[str, ...]:
        """Of training and held-out rows, without those that have none."""
        names = (source.name for source in (*self.train_sources, *self.eval_sources) if source.name)
        return tuple(dict.fromkeys(names))

    @property
    def files(self) -> dict[str, Path | Address]:
        """Every file of rows, by the setting that names it."""
        return {key: rows for key, _, rows in self._rows() if not isinstance(rows, ReasoningGymSource)}

    @property
    def tasks(self) -> dict[str, ReasoningGymSource]:
        """Every task of reasoning_gym, likewise."""
        return {key: rows for key, _, rows in self._rows() if isinstance(rows, ReasoningGymSource)}

    @property
    def sources_of_rows(self) -> dict[str, str]:
        """The source of each of these settings; empty for rows without a source."""
        return {key: name for key, name, _ in self._rows()}

    def _rows(self) -> Iterator[tuple[str, str, Path | Address | ReasoningGymSource]]:
        for key, value in (("data.train", self.train), ("data.eval", self.eval)):
            if not isinstance(value, tuple):
                yield from () if value is None else ((key, "", value),)
                continue
            for index, source in enumerate(value):
                yield f"{key}.{index}.path", source.name, source.path
                if isinstance(source, TrainSource) and source.eval is not None:
                    yield f"{key}.{index}.eval", source.name, source.eval

    @property
    def order_depends_on_steps(self) -> bool:
        """Whether which prompt comes next depends on the steps taken."""
        return self.difficulty is not None or bool(self.curriculum)

    @property
    def needs_accuracy(self) -> bool:
        """Whether a stage ends by held-out accuracy."""
        return any(stage.until_accuracy for stage in self.curriculum)

    def absolute(self) -> Self:
        """The same with the paths of this machine made absolute."""
        return self.model_copy(update={name: _absolute(getattr(self, name)) for name in ("train", "eval")})

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for key, sources in (("train", self.train), ("eval", self.eval)):
            if isinstance(sources, tuple) and not 1 <= len(sources) <= MAX_SOURCES:
                raise ValueError(f"{key}: {len(sources)} sources; give 1 to {MAX_SOURCES}")
        for key, names in (
            ("train", [source.name for source in self.train_sources]),
            ("eval", [source.name for source in self.eval_sources]),
        ):
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise ValueError(f"{key}: several sources are called {repeated[0]!r}; rename all but one")
        rewards = {source.name: source.reward for source in self.train_sources}
        for source in self.eval_sources:
            if source.reward != rewards.get(source.name, source.reward):
                raise ValueError(
                    f"eval: source {source.name!r}: reward: the source of data.train of that name has another, and "
                    "rewards go by name; leave it out, or rename the source"
                )
        if len(names) > MAX_SOURCES:
            raise ValueError(f"eval: {len(names)} sources with those of train; at most {MAX_SOURCES}")
        return self

    @model_validator(mode="after")
    def _stages_fit_sources(self) -> Self:
        sources = {source.name: source.weight for source in self.train_sources}
        if self.curriculum and not isinstance(self.train, tuple):
            raise ValueError("curriculum: has no effect without several sources; give data.train as a list of them")
        if self.difficulty is not None and not sources:
            raise ValueError("difficulty: has no effect without data.train; name rows, or leave it out")
        for source in self.train_sources if self.difficulty is not None else ():
            if isinstance(source.path, ReasoningGymSource) and source.path.size is None:
                raise ValueError(
                    f"difficulty: no row of {source.path} is repeated, so that none can rest; give it a size, or leave "
                    "difficulty out"
                )
        held_out = {source.name for source in self.eval_sources}
        for index, stage in enumerate(self.curriculum):
            if unmeasured := sorted(stage.until_accuracy.keys() - held_out):
                raise ValueError(
                    f"curriculum.{index}.until_accuracy: source {unmeasured[0]!r} has no held-out rows; name some in "
                    "data.eval, or as its own eval"
                )
            _check_stage(f"curriculum.{index}", stage, sources, is_last=index == len(self.curriculum) - 1)
        return self


def _check_stage(field: str, stage: Stage, sources: Mapping[str, float], *, is_last: bool) -> None:
    for key, names in (("weights", stage.weights), ("until_pass_rate", stage.until_pass_rate)):
        if unknown := sorted(set(names) - sources.keys()):
            raise ValueError(
                f"{field}.{key}: {unknown[0]!r} is no source of data.train; there are {', '.join(sources)}"
            )
    weights = {**sources, **stage.weights}
    if not any(weights.values()):
        raise ValueError(f"{field}.weights: no source has a weight above 0; give one of them some")
    if idle := [name for name in stage.until_pass_rate if weights[name] == 0]:
        raise ValueError(
            f"{field}.until_pass_rate: {idle[0]!r} has weight 0 in this stage and is never measured; give it some"
        )
    has_end = stage.for_steps is not None or bool(stage.until_pass_rate or stage.until_accuracy)
    if is_last and has_end:
        raise ValueError(f"{field}: the last stage never ends; leave out for_steps and until_*, or add a stage")
    if not is_last and not has_end:
        raise ValueError(
            f"{field}: it has no end, so that later stages never begin; give for_steps, until_pass_rate or "
            "until_accuracy"
        )
    if stage.fades and stage.for_steps is None:
        raise ValueError(f"{field}.fades: has no effect without for_steps; give its number of steps")


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.expanduser().absolute()
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    return tuple(
        source.model_copy(
            update={
                name: _absolute(path)
                for name in ("path", "eval")
                if isinstance(path := getattr(source, name, None), Path)
            }
        )
        for source in value
    )
