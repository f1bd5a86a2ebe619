"""Implements `penstock rescore`: scores every sample of a recording again by another reward model.

The samples go through the reward service's own pool: its batches, deadlines, retries and its rule that an error is
never a value. At most MAX_AHEAD samples are in memory; their order is kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from console.config.reward_settings import SUFFIXES, read_reward_settings
from console.recording.reader import read_samples
from console.recording.recorded_sample import Recorded
from console.recording.writer import RecordingWriter, open_writer
from penstock.config import ConfigError
from penstock.process.log_setup import configure_logging
from penstock.process.tasks import end, uninterrupted
from penstock.rewards import ModelAwayError, RewardLoadError, RewardModel
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.v1 import broker_pb2, reward_pb2, types_pb2
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.pool import ScoringPool, TextReader
from services.reward.texts import TokenTexts

MAX_AHEAD = 256
PATIENCE_S = 300.0
"""Longest time without a score before the reward model is given up."""
SAME = 1e-9
"""Rewards that differ by less count as equal."""
MAX_PAIRS = 64
DETAILS_BEGIN = " ("
_ADDRESS = re.compile(r"[^/]+:\d{1,5}")


@dataclass(slots=True)
class GraderPair:
    """How the values of two graders differ on the same samples."""

    num_compared: int = 0
    num_same: int = 0
    change_sum: float = 0.0
    distance_sum: float = 0.0

    def add(self, previous: float, new: float) -> None:
        """Take in one sample."""
        self.num_compared += 1
        self.num_same += math.isclose(previous, new, rel_tol=SAME, abs_tol=SAME)
        self.change_sum += new - previous
        self.distance_sum += abs(new - previous)

    def as_document(self) -> dict[str, Any]:
        """As JSON."""
        count = self.num_compared
        return {
            "num_compared": count,
            "agreement": self.num_same / count,
            "mean_change": self.change_sum / count,
            "mean_distance": self.distance_sum / count,
        }

    def words(self) -> str:
        """As text."""
        found = self.as_document()
        return (
            f"{found['num_compared']} samples, {100 * found['agreement']:.1f} % agree, change "
            f"{found['mean_change']:+.4f}, {found['mean_distance']:.4f} apart"
        )


def grader_of(score: types_pb2.Score) -> str:
    """Who gave a score: the reward model, and of a judge the model that answered and the prompt it was given."""
    # Of a part of a sum the names begin with the part's.
    of_judges = (name for name in sorted(score.details) if name.rpartition("/")[2] in ("answered", "prompt"))
    told = [f"{name} {score.details[name]}" for name in of_judges]
    return f"{score.model}{DETAILS_BEGIN}{', '.join(told)})" if told else score.model


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Comparison of the new scores with the old ones."""

    is_decoded: bool = False
    """Whether texts were decoded from token ids; otherwise they are the recording's."""
    num_samples: int = 0
    """Samples scored."""
    by_status: Counter[str] = field(default_factory=Counter)
    """Samples by the new score's status."""
    num_compared: int = 0
    """Samples with a value in both."""
    num_same: int = 0
    """Samples whose values are equal."""
    previous_sum: float = 0.0
    """Sum of their old values."""
    new_sum: float = 0.0
    """Sum of their new values."""
    distance_sum: float = 0.0
    """Sum of how far the two are apart."""
    by_graders: dict[tuple[str, str], GraderPair] = field(default_factory=dict)
    """The same by who gave the old value and who the new one."""
    num_without_text: int = 0
    """Samples with tokens but without text, which most reward models cannot judge."""

    def add(self, sample: Recorded) -> None:
        """Take in a sample that was scored again."""
        new, previous = sample.trajectory.score, sample.previous_score
        self.num_samples += 1
        self.by_status[types_pb2.ScoreStatus.Name(new.status).removeprefix("SCORE_STATUS_").lower()] += 1
        has_text = self.is_decoded or bool(sample.trajectory.text) or not sample.trajectory.token_ids
        self.num_without_text += not has_text
        if previous is not None and previous.HasField("value") and new.HasField("value"):
            self.num_compared += 1
            self.num_same += math.isclose(previous.value, new.value, rel_tol=SAME, abs_tol=SAME)
            self.previous_sum += previous.value
            self.new_sum += new.value
            self.distance_sum += abs(new.value - previous.value)
            self._pair(grader_of(previous), grader_of(new)).add(previous.value, new.value)

    def _pair(self, before: str, now: str) -> GraderPair:
        """The counts of two graders; of more pairs than MAX_PAIRS the rest are counted together."""
        known = (before, now) in self.by_graders or len(self.by_graders) < MAX_PAIRS
        return self.by_graders.setdefault((before, now) if known else ("others", "others"), GraderPair())

    def as_document(self) -> dict[str, Any]:
        """The comparison as JSON; means are None if nothing could be compared."""

        def mean(total: float) -> float | None:
            return total / self.num_compared if self.num_compared else None

        return {
            "num_samples": self.num_samples,
            "by_status": dict(self.by_status),
            "num_compared": self.num_compared,
            "agreement": mean(self.num_same),
            "mean_previous": mean(self.previous_sum),
            "mean_new": mean(self.new_sum),
            "mean_change": mean(self.new_sum - self.previous_sum),
            "mean_distance": mean(self.distance_sum),
            "by_graders": [
                {"previous": before, "new": now, **pair.as_document()}
                for (before, now), pair in sorted(self.by_graders.items())
            ],
            "num_without_text": self.num_without_text,
        }

    def lines(self) -> Iterator[str]:
        """The comparison as readable text."""
        statuses = ", ".join(f"{name} {count}" for name, count in sorted(self.by_status.items()))
        yield f"{self.num_samples} samples scored: {statuses}"
        if self.num_compared:
            old, new = self.previous_sum / self.num_compared, self.new_sum / self.num_compared
            same = f"{100 * self.num_same / self.num_compared:.1f} % of {self.num_compared} agree"
            apart = self.distance_sum / self.num_compared
            yield f"{same}; mean {old:.4f} before, {new:.4f} now, change {new - old:+.4f}; {apart:.4f} apart on average"
        if len(self.by_graders) > 1 or any(DETAILS_BEGIN in before + now for before, now in self.by_graders):
            for (before, now), pair in sorted(self.by_graders.items()):
                yield f"  {before} -> {now}: {pair.words()}"
        if self.num_without_text:
            yield f"note: {self.num_without_text} samples have tokens but no text; only token ids could be judged"


def rescore_command(file: Path, *, reward: str, out: Path, tokenizer: Path | None = None, as_json: bool) -> int:
    """Write a recording with new scores; returns the exit status. Raises ConfigError."""
    configure_logging("console", level="error")
    config = _reward_config(reward)
    try:
        texts = None if tokenizer is None else TokenTexts.of_model(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer: {error}; give the directory of the model that the recording is of") from error
    try:
        comparison = asyncio.run(_rescored(file, out, config, texts))
    except (RewardLoadError, ModelAwayError) as error:
        raise ConfigError(str(error)) from error
    if as_json:
        print(json.dumps(comparison.as_document()))
    else:
        print("\n".join(comparison.lines()))
        if texts is not None and texts.warning:
            print(f"note: {texts.warning}")
    return 0


def _reward_config(reward: str) -> RewardModelConfig:
    """The settings that `reward` names: a configuration with a section `reward`, or a reward model."""
    if not reward.endswith(SUFFIXES):
        return RewardModelConfig(model=f"grpc://{reward}" if _ADDRESS.fullmatch(reward) else reward)
    return read_reward_settings(Path(reward))


async def _rescored(file: Path, out: Path, config: RewardModelConfig, texts: TextReader | None) -> Comparison:
    model = build_model(config, judges=Security.from_environment(JUDGES))
    try:
        await model.probe()
        writer = open_writer(out)
        try:
            comparison = await rescore(read_samples(file), writer, model, config=config, texts=texts)
        except BaseException:
            writer.discard()
            raise
        writer.close()
        return comparison
    finally:
        await model.close()


async def rescore(
    samples: Iterator[Recorded],
    writer: RecordingWriter,
    model: RewardModel,
    *,
    config: RewardModelConfig | None = None,
    texts: TextReader | None = None,
    patience_s: float = PATIENCE_S,
) -> Comparison:
    """Score samples and write them, in order, using the recording's own text if `texts` is None.

    Raises ConfigError if no score arrives for `patience_s` seconds.
    """
    # What a grader cannot judge is kept and counted; in a run, samples would wait for it.
    config = (config or RewardModelConfig()).model_copy(update={"max_error_share": 1.0})
    comparison = Comparison(is_decoded=texts is not None)
    pool = ScoringPool(model=model, config=config, texts=texts)
    turn = asyncio.Semaphore(config.max_concurrent_batches)

    async def rescored(batch: list[Recorded]) -> list[Recorded]:
        leases = [broker_pb2.ScoringLease(lease_id=str(at), item=_item(sample)) for at, sample in enumerate(batch)]
        async with turn:
            scores = {int(result.lease_id): result.score for result in await pool.score(leases)}
        return [sample.rescored(scores[at]) for at, sample in enumerate(batch)]

    ahead: deque[asyncio.Task[list[Recorded]]] = deque()
    try:
        while True:
            while len(ahead) < MAX_AHEAD // config.max_batch_size:
                batch = list(islice(samples, config.max_batch_size))
                if not batch:
                    break
                ahead.append(asyncio.create_task(rescored(batch)))
            if not ahead:
                return comparison
            running = [task for task in ahead if not task.done()]
            done, _ = await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ConfigError(f"reward model {model.name}: no score in {patience_s:g} s; is it running?")
            while ahead and ahead[0].done():
                ready = ahead.popleft().result()
                for sample in ready:
                    comparison.add(sample)
                await uninterrupted(asyncio.to_thread(writer.write, ready))
    finally:
        await end(*ahead)


def _item(sample: Recorded) -> reward_pb2.ScoreItem:
    prompt, trajectory = sample.prompt, sample.trajectory
    return reward_pb2.ScoreItem(
        key=trajectory.key,
        prompt_text=prompt.text,
        messages=prompt.messages,
        completion_text=trajectory.text,
        answer=prompt.answer,
        metadata_json=prompt.metadata_json,
        token_ids=trajectory.token_ids,
        finish_reason=trajectory.finish_reason,
        run_id=sample.run_id,
    )
