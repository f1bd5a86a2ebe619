"""What a reward worker is measured with: samples of a recording, or rows with their answers in place of completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from console.config.config import load_run_config
from console.config.reward_settings import RewardDocument, read_reward_settings
from console.recording.reader import read_samples
from console.trajectories.rescore_recording import score_item
from penstock.config import ConfigError
from penstock.reasoning_gym.source import ReasoningGymSource
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.storage.fetched import fetched
from penstock.v1 import reward_pb2, types_pb2
from penstock.wire.source_tag import SourceTag
from services.reward.config import ModelConfig, RewardModelConfig
from services.trainer.data.prompt_order import EncodedPrompt, build_prompt
from services.trainer.data.prompt_rows import Row, read_rows

MAX_SAMPLES = 256
_INSTANT = frozenset({"exact_match", "format", "length", "ngram_repetition", "numeric"})
"""Built-in rules that take microseconds: no plan has to count their workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurable:
    """What there is to score, and by what."""

    settings: RewardDocument
    items: tuple[reward_pb2.ScoreItem, ...]
    are_recorded: bool


def reward_name(settings: RewardDocument) -> str:
    """The models of a run's rewards, each once, joined by ` + `."""
    return " + ".join(dict.fromkeys(each.model for each in _models(settings)))


def takes_time(settings: RewardDocument) -> bool:
    """Whether a plan has to know how long samples take to score."""
    return any(each.model not in _INSTANT for each in _models(settings))


def elsewhere(settings: RewardDocument) -> str:
    """The first reward that an endpoint elsewhere gives, whose rate is no machine's here; empty if none is."""
    models = (each.model for each in _models(settings))
    return next((model for model in models if model == "judge" or model.startswith(THIRD_PARTY)), "")


def _models(settings: RewardDocument) -> Iterator[ModelConfig]:
    rewards: list[RewardModelConfig] = [settings.reward, *settings.sources.values()]
    return (model for reward in rewards for model in reward.models)


def read_measurable(run: Path, recording: Path | None) -> Measurable:
    """At most MAX_SAMPLES, spread over the run's rows; of a recording the first ones.

    Args:
        run: The run's configuration; it names rows and rewards.
        recording: Where completions come from; None takes rows' reference answers.

    Raises:
        ConfigError: There is nothing to score, or a file cannot be read.
    """
    settings = read_reward_settings(run)
    if recording is not None:
        items = tuple(score_item(sample) for sample in islice(read_samples(recording), MAX_SAMPLES))
        if not items:
            raise ConfigError(f"--data: {recording} holds no sample; give the recording of a run that trained some")
        return Measurable(settings=settings, items=items, are_recorded=True)
    return Measurable(settings=settings, items=tuple(_answered(run)), are_recorded=False)


def _answered(run: Path) -> Iterator[reward_pb2.ScoreItem]:
    sources = load_run_config(run).data.train_sources
    for source in sources:
        if isinstance(source.path, ReasoningGymSource):
            raise ConfigError(f"{run}: data.train names a task, whose rows are not in a file; give --data a recording")
        rows = read_rows(fetched("data.train", source.path))
        answered = [row for row in rows if row.answer]
        if not answered:
            raise ConfigError(
                f"{source.path}: no row has an answer to score in place of a completion; give --data the recording of "
                "a run (record: true)"
            )
        wanted = max(1, MAX_SAMPLES // len(sources))
        for row in answered[:: max(1, len(answered) // wanted)][:wanted]:
            yield _item(row, source.name)


def _item(row: Row, source: str) -> reward_pb2.ScoreItem:
    prompt = build_prompt(
        EncodedPrompt(row=row, token_ids=()),
        group_id="probe",
        group_size=1,
        sampling=types_pb2.SamplingParams(),
        purpose=types_pb2.PURPOSE_TRAIN,
        tag=SourceTag(source=source),
    )
    return reward_pb2.ScoreItem(
        prompt_text=prompt.text,
        messages=prompt.messages,
        completion_text=row.answer,
        answer=row.answer,
        metadata_json=prompt.metadata_json,
    )
