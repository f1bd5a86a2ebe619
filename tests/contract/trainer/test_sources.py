"""A run of several sources: what each prompt carries, and that a killed run goes on with the very same prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.v1 import types_pb2
from penstock.wire.source_tag import read_tag
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker, scored_group
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_alone, run_document, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NUM_STEPS, KILLED_AFTER = 14, 6


class RecordingBroker(ScriptedTrainingBroker):
    """Hands out in the order of submission, and keeps everything that it was sent since it was last asked."""

    def __init__(self) -> None:
        super().__init__(max_queued=3)
        self.make_group = self._scored
        self.sent: dict[str, types_pb2.Prompt] = {}

    async def SubmitPrompts(self, request, context):
        response = await super().SubmitPrompts(request, context)
        refused = {error.index for error in response.errors}
        self.sent |= {prompt.group_id: prompt for n, prompt in enumerate(request.prompts) if n not in refused}
        return response

    def _next(self, hello, room):
        self.ready.sort(key=list(self.prompts).index)
        return super()._next(hello, room)

    @staticmethod
    def _scored(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
        """Every second row of easy is always right, and every third of hard never is."""
        group, tag = scored_group(prompt, policy_version=policy_version), read_tag(prompt.metadata_json)
        fixed = {"easy": 1.0 if tag and tag.row % 2 else None, "hard": None if tag and tag.row % 3 else 0.0}
        for trajectory in group.trajectories:
            if tag is not None and (value := fixed.get(tag.source)) is not None:
                trajectory.score.value = value
        return group


def document_of(folder: Path, model: Path, target: str) -> dict:
    document = run_document(folder, model, target, num_steps=NUM_STEPS, checkpoint_every_steps=1, num_eval_prompts=2)
    # What is measured at step 4 counts at step 8.
    document["run"] |= {"keep_checkpoints": NUM_STEPS, "eval_every_steps": 4}
    easy, hard = write_rows(folder / "easy.jsonl", 4), write_rows(folder / "hard.jsonl", 5)
    document["data"] = {
        "train": [
            {"name": "easy", "path": str(easy), "weight": 2, "group_size": 2, "eval": str(easy)},
            {"name": "hard", "path": str(hard), "max_new_tokens": 9},
        ],
        "eval": [{"name": "hard", "path": str(write_rows(folder / "held_out.jsonl", 5))}],
        "difficulty": {"after": 1, "for_epochs": 1},
        "curriculum": [
            {"weights": {"hard": 0.5}, "for_steps": 4, "fades": True},
            {"weights": {"hard": 6}, "until_accuracy": {"easy": 0.5}},
            {"weights": {"hard": 8}},
        ],
    }
    return document


async def test_a_killed_run_of_several_sources_goes_on_with_the_same_prompts(tmp_path, model) -> None:
    broker = RecordingBroker()
    async with serving(broker.service()) as (_, target):
        document = document_of(tmp_path, model, target)
        run_dir = await run_alone(document)
        whole, broker.sent = broker.sent, {}
        # As after a kill -9: only the checkpoint of an early step is there.
        for step in range(KILLED_AFTER + 1, NUM_STEPS + 1):
            (run_dir / "checkpoints" / f"step_{step}" / "COMPLETE").unlink()
        (run_dir / "evaluations.jsonl").unlink()
        write_rows(tmp_path / "held_out.jsonl", 6)
        with capture_logs() as logs:
            await run_alone(document, resume=True)
    (warning,) = [line for line in logs if line["event"].startswith("held-out rows have changed")]
    assert warning["field"] == "data.eval (hard)"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "completed", summary["message"]
    assert summary["samples_trained"] == sum(found["samples_trained"] for found in summary["sources"].values())
    assert broker.books().balanced
    again = {name: prompt for name, prompt in broker.sent.items() if name.startswith("t")}
    assert len(again) >= 2 * (NUM_STEPS - KILLED_AFTER)
    assert {name: whole[name] for name in again} == again
    prompts = [prompt for name, prompt in whole.items() if name.startswith("t")]
    assert len(prompts) == 2 * NUM_STEPS
    tags = [tag for prompt in prompts if (tag := read_tag(prompt.metadata_json)) is not None]
    assert {(tag.source, p.group_size, p.sampling.max_new_tokens) for tag, p in zip(tags, prompts, strict=True)} == {
        ("easy", 2, 16),
        ("hard", 4, 9),
    }
    assert {json.loads(p.metadata_json)["level"] for p in prompts} == {tag.row for tag in tags}
    # Rows that teach nothing rest every now and then.
    visits = Counter(tag.row for tag in tags if tag.source == "hard")
    assert max(visits[0], visits[3]) < min(visits[1], visits[2], visits[4])
    # What the files say of each source.
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in steps] == list(range(1, NUM_STEPS + 1))
    for name, size in (("easy", 2), ("hard", 4)):
        of_source = [line for line in steps if f"source/{name}/groups" in line]
        assert sum(line[f"source/{name}/samples"] for line in of_source) == size * sum(
            line[f"source/{name}/groups"] for line in of_source
        )
        assert all(line[f"source/{name}/pass_rate"] == line[f"source/{name}/reward_mean"] for line in of_source)
        assert {line[f"source/{name}/zero_variance_share"] for line in of_source} >= {0.0, 1.0}
        assert max(line[f"source/{name}/resting_rows"] for line in steps) > 0
    assert sum(line.get("source/easy/groups", 0) + line.get("source/hard/groups", 0) for line in steps) == 2 * NUM_STEPS
    shares = [line["source/hard/share"] for line in steps]
    assert shares[0] < shares[2] < shares[3] == shares[6] == 6 / 8
    assert shares[7] == shares[-1] == 8 / 10
    first, last = ([tag.source for tag in tags[part]].count("easy") for part in (slice(6), slice(-6, None)))
    assert first > last
    lines = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert {name for line in lines for name in line if name.startswith("source/")} == {
        f"source/{name}/{key}"
        for name in ("easy", "hard")
        for key in ("sampled_accuracy", "greedy_accuracy", "num_prompts")
    }
