"""Rescoring a recording: order and rows stay, the old score is kept, an error is never a value."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from console.recording.reader import read_samples
from console.recording.recorded_sample import Recorded, RecordingError
from console.recording.writer import open_writer
from console.trajectories.comparison import grader_of
from console.trajectories.rescore_recording import MAX_AHEAD, Grader, rescore, rescore_command
from penstock.config import ConfigError
from penstock.rewards import RewardResult, reward
from penstock.rewards.local import LocalModel
from penstock.rewards.serving import reward_service
from penstock.v1 import reward_pb2, types_pb2
from penstock.wire.codec import int32_bytes
from penstock.wire.source_tag import SourceTag, tagged
from services.reward.config import RewardModelConfig
from tests.helpers.brokers import recordings
from tests.helpers.models.tokenizer_kinds import letters
from tests.helpers.ports import free_address
from tests.helpers.rewards.scripted_judge import scripted_judge, verdict
from tests.helpers.serving import serving


@reward
async def by_index(metadata: dict[str, Any], completion: str) -> RewardResult | float | None:
    """Rewards what the metadata says; None abstains; "bad" fails."""
    assert completion == "zwei \u4e8c"
    value = metadata["value"]
    if value == "bad":
        raise ValueError("no")
    return None if value is None else float(value)


def recorded(*key: Any, **values: Any) -> Recorded:
    """A sample of which the model wrote everything."""
    made = recordings.recorded(*key, **values)
    made.trajectory.loss_mask = b""
    return made


def sample(index: int, value: object, *, was: float = 0.5) -> Recorded:
    made = recorded("g", index, value=was)
    made.prompt.metadata_json = json.dumps({"value": value})
    return made


def write(path: Path, *samples: Recorded) -> Path:
    writer = open_writer(path)
    writer.write(samples)
    writer.close()
    return path


def rescored(file: Path, out: Path, model: str) -> int:
    return rescore_command(file, reward=model, out=out, as_json=True)


async def test_scores_of_a_served_model_replace_the_recorded_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [sample(0, 0.5), sample(1, 2.0), sample(2, None), sample(3, "bad")]
    file, out = write(tmp_path / "a.jsonl", *samples), tmp_path / "b.parquet"
    async with serving(reward_service(LocalModel(by_index))) as (_, target):
        assert await asyncio.to_thread(rescored, file, out, target) == 0
    found = list(read_samples(out))
    assert [one.position for one in found] == [one.position for one in samples]
    assert [one.trajectory.score.status for one in found] == [
        types_pb2.SCORE_STATUS_OK,
        types_pb2.SCORE_STATUS_OK,
        types_pb2.SCORE_STATUS_ABSTAINED,
        types_pb2.SCORE_STATUS_FAILED,
    ]
    assert [one.trajectory.score.value for one in found] == [0.5, 2.0, 0.0, 0.0]
    assert [one.trajectory.score.HasField("value") for one in found] == [True, True, False, False]
    for one, before in zip(found, samples, strict=True):
        assert one.previous_score == before.trajectory.score
        assert one.trajectory.token_ids == before.trajectory.token_ids
    document = json.loads(capsys.readouterr().out)
    assert document["by_status"] == {"ok": 2, "abstained": 1, "failed": 1}
    assert (document["num_compared"], document["agreement"], document["mean_change"]) == (2, 0.5, 0.75)


@pytest.mark.parametrize(("decodes", "value"), [(False, 1.0), (True, 0.0)], ids=["as recorded", "decoded"])
def test_what_is_judged_is_the_recorded_text_or_what_the_tokens_say(
    tmp_path: Path, decodes: bool, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    letters(tmp_path)
    lie = recorded(value=0.5)
    lie.trajectory.text, lie.trajectory.token_ids = "2", int32_bytes([2, 3, 3])
    file, out = write(tmp_path / "a.jsonl", lie), tmp_path / "b.jsonl"
    tokenizer = tmp_path if decodes else None
    assert rescore_command(file, reward="exact_match", out=out, tokenizer=tokenizer, as_json=False) == 0
    (found,) = read_samples(out)
    assert found.trajectory.score.value == value
    assert ("note: 1 of 1 texts were not what their tokens say" in capsys.readouterr().out) == decodes


def test_words_of_an_environment_are_scored_as_in_a_run_and_not_at_all_without_the_tokenizer(tmp_path: Path) -> None:
    letters(tmp_path)
    session = recorded(value=0.5)
    session.trajectory.token_ids, session.trajectory.loss_mask = int32_bytes([2, 3, 3]), b"\1\0\0"
    file, out, settings = write(tmp_path / "a.jsonl", session), tmp_path / "b.jsonl", tmp_path / "short.yaml"
    settings.write_text(json.dumps({"reward": {"model": "length", "length": {"target_tokens": 1}}}))
    with pytest.raises(
        ConfigError, match=r"--tokenizer: required: sample \d+ of group g\S* was given tokens by an env"
    ):
        rescore_command(file, reward=str(settings), out=out, as_json=False)
    assert not out.exists()
    assert rescore_command(file, reward=str(settings), out=out, tokenizer=tmp_path, as_json=False) == 0
    (found,) = read_samples(out)
    assert (found.trajectory.score.status, found.trajectory.score.value) == (types_pb2.SCORE_STATUS_OK, 0.0), (
        "one token"
    )


def test_a_tokenizer_that_is_none_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", recorded())
    with pytest.raises(ConfigError, match=r"--tokenizer: .*: holds no tokenizer.json; give the directory of the model"):
        rescore_command(file, reward="exact_match", out=tmp_path / "b.jsonl", tokenizer=tmp_path, as_json=False)


def test_a_built_in_model_scores_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = recorded(value=0.0)
    good.trajectory.text = "2"
    file = write(tmp_path / "a.jsonl", good)
    assert rescore_command(file, reward="exact_match", out=tmp_path / "b.jsonl", as_json=False) == 0
    [found] = read_samples(tmp_path / "b.jsonl")
    assert (found.trajectory.score.value, found.trajectory.score.model) == (1.0, "exact_match")
    shown = capsys.readouterr().out
    assert "1 samples scored: ok 1" in shown
    assert "0.0 % of 1 agree; mean 0.0000 before, 1.0000 now, change +1.0000; 1.0000 apart on average" in shown


async def test_a_judge_rescores_by_its_configuration_and_drift_is_shown_by_who_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [recorded("g", index, value=0.5) for index in range(4)]
    for one, judged_by in zip(samples, ("judge-0@fp", "judge-0@fp", "judge-1@fp", ""), strict=True):
        one.trajectory.score.details.clear()
        if judged_by:
            one.trajectory.score.details.update({"answered": judged_by, "prompt": "1-abc"})
    file, out, settings = write(tmp_path / "a.jsonl", *samples), tmp_path / "b.parquet", tmp_path / "judge.yaml"
    async with scripted_judge(lambda _: verdict(correct=7)) as judge:
        document = {"url": judge.url, "model": "j", "rubric": {"correct": "It is right."}}
        settings.write_text(json.dumps({"reward": {"model": "judge", "judge": document}}))
        assert await asyncio.to_thread(rescored, file, out, str(settings)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mean_distance"] == pytest.approx(0.2)
    now = f"judge:j (answered judge-1@fp-a, prompt {next(read_samples(out)).trajectory.score.details['prompt']})"
    assert {(pair["previous"], pair["new"]): pair["num_compared"] for pair in document["by_graders"]} == {
        ("m", now): 1,
        ("m (answered judge-0@fp, prompt 1-abc)", now): 2,
        ("m (answered judge-1@fp, prompt 1-abc)", now): 1,
    }
    [first, *_] = read_samples(out)
    assert dict(first.trajectory.score.details)["votes"] == "[0.7]"
    parts = types_pb2.Score(model="a+b", details={"b/answered": "j@fp", "b/votes": "[1]", "a/other": "x"})
    assert grader_of(parts) == "a+b (b/answered j@fp)"
    assert first.previous_score == samples[0].trajectory.score
    settings.write_text("model: judge\n")
    with pytest.raises(ConfigError, match="has no section reward"):
        rescored(file, tmp_path / "c.jsonl", str(settings))


def test_a_composite_of_a_configuration_scores_with_its_components(tmp_path: Path) -> None:
    good = recorded(value=0.0)
    good.trajectory.text = "<think>1+1</think> 2"
    file, config = write(tmp_path / "a.jsonl", good), tmp_path / "run.yaml"
    parts = "[{model: exact_match}, {model: format, weight: 0.5, format: {tags: [think]}}]"
    config.write_text(f"run: {{id: other}}\nreward: {parts}\n")
    assert rescored(file, tmp_path / "b.jsonl", str(config)) == 0
    [found] = read_samples(tmp_path / "b.jsonl")
    score = found.trajectory.score
    assert (score.value, dict(score.components)) == (1.5, {"exact_match": 1.0, "format": 1.0})
    config.write_text("run: {id: other}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: has no section reward"):
        rescored(file, tmp_path / "c.jsonl", str(config))


@pytest.mark.parametrize("of", ["a run", "a reward worker"])
def test_samples_are_scored_by_the_rewards_of_their_sources(tmp_path: Path, of: str) -> None:
    samples = [recorded("g", index) for index in range(70)]
    for index, one in enumerate(samples):
        one.prompt.answer, one.trajectory.text = "7.0", "7"
        one.prompt.metadata_json = tagged("", SourceTag(source=("near", "far", "none")[index % 3]))
    config, numeric = tmp_path / "my.yaml", {"model": "numeric", "max_batch_size": 4}
    own: dict[str, Any] = {"sources": {"near": numeric}}
    if of == "a run":
        own = {"data": {"train": [{"name": "near", "path": "a", "reward": numeric}, {"name": "far", "path": "b"}]}}
    config.write_text(json.dumps({"reward": {"model": "exact_match"}, **own}))
    assert rescored(write(tmp_path / "a.jsonl", *samples), tmp_path / "b.jsonl", str(config)) == 0
    scores = [one.trajectory.score for one in read_samples(tmp_path / "b.jsonl")]
    assert [score.model for score in scores] == ["exact_match" if index % 3 else "numeric" for index in range(70)]
    assert [score.value for score in scores] == [float(index % 3 == 0) for index in range(70)]


async def test_a_reward_that_fails_for_most_is_not_waited_for(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "b.jsonl")
    samples = iter([sample(index, "bad" if index % 4 else 1.0) for index in range(40)])
    comparison = await rescore(samples, writer, [Grader(LocalModel(by_index), config=RewardModelConfig(max_retries=0))])
    writer.close()
    assert comparison.by_status == {"ok": 10, "failed": 30}


class _Slow:
    """A model that answers batches in no particular order, the first one only when no more samples are read."""

    name = "slow"

    def __init__(self) -> None:
        self.num_read = 0
        self.most_ahead = 0

    def samples(self, count: int) -> Iterator[Recorded]:
        for index in range(count):
            self.num_read += 1
            yield sample(index, index)

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        await asyncio.sleep(0.002 * (items[0].key.sample_index % 3))
        if items[0].key.sample_index == 0:
            while self.most_ahead < self.num_read:
                self.most_ahead = self.num_read
                await asyncio.sleep(0.05)
        return [types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=item.key.sample_index) for item in items]


async def test_order_is_kept_and_memory_is_bounded(tmp_path: Path) -> None:
    model: Any = _Slow()
    writer = open_writer(tmp_path / "b.jsonl")
    comparison = await rescore(model.samples(1000), writer, [Grader(model)])
    writer.close()
    assert comparison.num_samples == 1000
    assert [one.trajectory.score.value for one in read_samples(writer.path)] == list(range(1000))
    assert model.most_ahead == MAX_AHEAD


async def test_a_model_that_never_answers_is_given_up(tmp_path: Path) -> None:
    class Deaf(_Slow):
        async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
            await asyncio.Event().wait()
            return []

    model: Any = Deaf()
    writer = open_writer(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match=r"slow: no score in 0\.05 s"):
        await rescore(model.samples(5), writer, [Grader(model)], patience_s=0.05)
    writer.discard()


@pytest.mark.parametrize(
    ("model", "words"), [("exact_mtach", "did you mean 'exact_match'"), ("nowhere_at_all:f", "no module")]
)
def test_a_model_that_does_not_exist_is_reported(tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rescored(write(tmp_path / "a.jsonl", recorded()), tmp_path / "b.jsonl", model)
    assert not (tmp_path / "b.jsonl").exists()


def test_a_model_that_is_away_and_a_damaged_recording_leave_nothing_behind(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", recorded())
    with pytest.raises(ConfigError, match="reward model"):
        rescored(file, tmp_path / "b.jsonl", free_address())
    row = json.loads(file.read_text())
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"logprobs": []}) + "\n")
    with pytest.raises(RecordingError, match="line 2: logprobs"):
        rescored(file, tmp_path / "b.jsonl", "exact_match")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
