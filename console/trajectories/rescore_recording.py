"""Implements `penstock rescore`: scores every sample of a recording again by another reward model.

The samples go through the reward service's own pools, one for each reward: their batches, deadlines, retries and their
rule that an error is never a value. At most MAX_AHEAD samples are in memory; their order is kept.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from console.config.reward_settings import SUFFIXES, RewardDocument, own_security, read_reward_settings
from console.recording.reader import read_samples
from console.recording.recorded_sample import Recorded
from console.recording.writer import RecordingWriter, open_writer
from console.trajectories.comparison import Comparison
from penstock.config import ConfigError
from penstock.process.log_setup import configure_logging
from penstock.process.tasks import end, uninterrupted
from penstock.rewards import ModelAwayError, RewardLoadError, RewardModel
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.v1 import broker_pb2, reward_pb2
from penstock.wire.mask_runs import mask_runs
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.models.by_source import distinct_rewards, reward_number
from services.reward.pool import ScoringPool, TextReader
from services.reward.texts import TokenTexts

MAX_AHEAD = 256
PATIENCE_S = 300.0
"""Longest time without a score before the reward model is given up."""
_ADDRESS = re.compile(r"[^/]+:\d{1,5}")


def rescore_command(file: Path, *, reward: str, out: Path, tokenizer: Path | None = None, as_json: bool) -> int:
    """Write a recording with new scores; returns the exit status. Raises ConfigError."""
    configure_logging("console", level="error")
    settings = _reward_settings(reward)
    try:
        texts = None if tokenizer is None else TokenTexts.of_model(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer: {error}; give the directory of the model that the recording is of") from error
    try:
        comparison = asyncio.run(_rescored(file, out, settings, texts))
    except (RewardLoadError, ModelAwayError) as error:
        raise ConfigError(str(error)) from error
    if as_json:
        print(json.dumps(comparison.as_document()))
    else:
        print("\n".join(comparison.lines()))
        if texts is not None and texts.warning:
            print(f"note: {texts.warning}")
    return 0


def _reward_settings(reward: str) -> RewardDocument:
    """The settings that `reward` names: a configuration with a section `reward`, or a reward model."""
    if not reward.endswith(SUFFIXES):
        address = f"grpc://{reward}" if _ADDRESS.fullmatch(reward) else reward
        return RewardDocument(reward=RewardModelConfig(model=address))
    return read_reward_settings(Path(reward))


async def _rescored(file: Path, out: Path, settings: RewardDocument, texts: TextReader | None) -> Comparison:
    configs, by_source = distinct_rewards(settings.reward, settings.sources)
    judges = Security.from_environment(JUDGES)
    models: list[RewardModel] = []
    try:
        for config in configs:
            models.append(build_model(config, judges=judges, security=own_security(config)))
            await models[-1].probe()
        graders = [Grader(model, config=config, texts=texts) for model, config in zip(models, configs, strict=True)]
        writer = open_writer(out)
        try:
            comparison = await rescore(read_samples(file), writer, graders, by_source=by_source)
        except BaseException:
            writer.discard()
            raise
        if not comparison.num_samples:
            writer.discard()
            raise ConfigError(f"{file}: holds no samples; name a recording of a run that trained")
        writer.close()
        return comparison
    finally:
        await asyncio.gather(*(model.close() for model in models))


class Grader:
    """A reward model with the settings by which it is called."""

    def __init__(
        self, model: RewardModel, *, config: RewardModelConfig | None = None, texts: TextReader | None = None
    ) -> None:
        """Scores the recording's own text if `texts` is None."""
        # What a grader cannot judge is kept and counted; in a run, samples would wait for it.
        self._config = (config or RewardModelConfig()).model_copy(update={"max_error_share": 1.0})
        self.max_batch_size = self._config.max_batch_size
        self._model = model
        self.is_decoding = texts is not None
        self._pool = ScoringPool(model=model, config=self._config, texts=texts)
        self._turn = asyncio.Semaphore(self._config.max_concurrent_batches)

    @property
    def name(self) -> str:
        """The model's own name, once known."""
        return self._model.name

    async def score(self, leases: Sequence[broker_pb2.ScoringLease]) -> list[broker_pb2.ScoreResult]:
        """The result of each lease, in any order."""
        results: list[broker_pb2.ScoreResult] = []
        most = self.max_batch_size
        for start in range(0, len(leases), most):
            async with self._turn:
                results += await self._pool.score(leases[start : start + most])
        return results


async def rescore(
    samples: Iterator[Recorded],
    writer: RecordingWriter,
    graders: Sequence[Grader],
    *,
    by_source: Mapping[str, int] | None = None,
    patience_s: float = PATIENCE_S,
) -> Comparison:
    """Score samples and write them, in order.

    Args:
        samples: What to score.
        writer: Where to.
        graders: The run's first.
        by_source: The number of the grader of each source that has its own.
        patience_s: After this many seconds without a score it gives up with a ConfigError.

    Raises ConfigError: a sample talked with an environment, and no tokenizer tells its words from the model's.
    """
    comparison = Comparison(is_decoded=graders[0].is_decoding)
    num_read = min(MAX_AHEAD, max(each.max_batch_size for each in graders))

    async def rescored(batch: list[Recorded]) -> list[Recorded]:
        leases: list[list[broker_pb2.ScoringLease]] = [[] for _ in graders]
        for at, sample in enumerate(batch):
            number = reward_number(sample.prompt.metadata_json, by_source or {})
            leases[number].append(_lease(sample, lease_id=str(at), is_decoded=graders[0].is_decoding))
        found = await asyncio.gather(*(each.score(own) for each, own in zip(graders, leases, strict=True)))
        scores = {int(result.lease_id): result.score for results in found for result in results}
        return [sample.rescored(scores[at]) for at, sample in enumerate(batch)]

    ahead: deque[asyncio.Task[list[Recorded]]] = deque()
    try:
        while True:
            while len(ahead) < MAX_AHEAD // num_read:
                batch = list(islice(samples, num_read))
                if not batch:
                    break
                ahead.append(asyncio.create_task(rescored(batch)))
            if not ahead:
                return comparison
            running = [task for task in ahead if not task.done()]
            done, _ = await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                names = ", ".join(each.name for each in graders)
                raise ConfigError(f"reward model {names}: no score in {patience_s:g} s; is it running?")
            while ahead and ahead[0].done():
                ready = ahead.popleft().result()
                for sample in ready:
                    comparison.add(sample)
                await uninterrupted(asyncio.to_thread(writer.write, ready))
    finally:
        await end(*ahead)


def score_item(sample: Recorded) -> reward_pb2.ScoreItem:
    """What a reward model is shown of a recorded sample; of a session the whole exchange as its text."""
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


def _lease(sample: Recorded, *, lease_id: str, is_decoded: bool) -> broker_pb2.ScoringLease:
    """The lease under which a sample is scored, as a run's; no broker knows it."""
    mask = sample.trajectory.loss_mask
    runs = mask_runs(mask) if b"\0" in mask else []
    if runs and not is_decoded:
        group_id, index = sample.position
        raise ConfigError(
            f"--tokenizer: required: sample {index} of group {group_id} was given tokens by an environment, whose text "
            "cannot be separated from the model's in the recorded text; name the directory of the model"
        )
    return broker_pb2.ScoringLease(lease_id=lease_id, item=score_item(sample), loss_mask_runs=runs)
