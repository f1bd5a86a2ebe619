"""What of a publication holds up training: the copy alone, never the file, its digests or a delta."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoints import rank_files
from services.trainer.publishing import delta_maker
from services.trainer.publishing.delta_maker import DELTAS, Outcome
from services.trainer.publishing.version_store import WeightStore
from services.trainer.run.loop import StepLoop
from services.trainer.step.step import TrainingStep
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_alone, run_document

pytestmark = pytest.mark.usefixtures("one_thread")


async def completed_run(folder: Path, model: Path, **run: int) -> Path:
    broker = ScriptedTrainingBroker()
    async with serving(broker.service()) as (_, target):
        run_dir = await run_alone(run_document(folder, model, target, num_eval_prompts=0, **run))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "completed", summary["message"]
    return run_dir


async def test_deltas_that_never_end_hold_up_no_step_and_no_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_paths: Path, is_wanted: Callable[[], bool], **_details: Any) -> None:
        ended = threading.Event()
        while is_wanted():
            ended.wait(0.005)

    late = DELTAS.labels(Outcome.LATE)._value.get()
    monkeypatch.setattr(delta_maker, "write_delta", never)
    run_dir = await completed_run(tmp_path, model, num_steps=4)
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4
    assert DELTAS.labels(Outcome.LATE)._value.get() == late + delta_maker.MAX_UNDER_WAY


async def test_the_next_step_is_computed_while_a_version_is_written_and_digested(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 is digested only once step 2 was taken: a step that waited for it would never be."""
    digest, finish, add = rank_files.digest_together, TrainingStep.finish, WeightStore.add
    is_second_taken = threading.Event()
    order: list[str] = []

    def slow_digest(path: Path, **details: Any) -> Any:
        if path.name.startswith("v1-"):
            assert is_second_taken.wait(30)
        return digest(path, **details)

    def noted_finish(step: TrainingStep) -> Any:
        report = finish(step)
        order.append("step")
        if order.count("step") == 2:
            is_second_taken.set()
        return report

    def noted_add(store: WeightStore, version: Any) -> None:
        order.append(f"version {version.manifest.policy_version}")
        add(store, version)

    monkeypatch.setattr(rank_files, "digest_together", slow_digest)
    monkeypatch.setattr(TrainingStep, "finish", noted_finish)
    monkeypatch.setattr(WeightStore, "add", noted_add)
    await completed_run(tmp_path, model, num_steps=2)
    assert order == ["version 0", "step", "step", "version 1", "version 2"]


async def test_each_step_says_what_publishing_took_of_it(tmp_path: Path, model: Path) -> None:
    run_dir = await completed_run(tmp_path, model, num_steps=3)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "publish/offer_s" not in lines[0]
    for line in lines:
        assert line["publish/pause_share"] == pytest.approx(line["wait/publishing_s"] / line["time/step_s"])
        assert 0 <= line["publish/pause_share"] <= 1
    for line in lines[1:]:
        assert line["publish/offer_s"] > line["publish/write_s"] + line["publish/digest_s"] > 0
    size_bytes = (run_dir / "weights" / "v3-h0.safetensors").stat().st_size
    assert {line["publish/bytes"] for line in lines[1:]} == {size_bytes}


async def test_the_time_to_offer_counts_from_the_optimiser_step_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the acknowledgement and the copy take is in it."""
    delay_s, acknowledge = 0.3, StepLoop._acknowledge

    async def slow_acknowledge(loop: StepLoop, group_ids: Any) -> None:
        await asyncio.sleep(delay_s)
        await acknowledge(loop, group_ids)

    monkeypatch.setattr(StepLoop, "_acknowledge", slow_acknowledge)
    run_dir = await completed_run(tmp_path, model, num_steps=2)
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["publish/offer_s"] > delay_s > line["publish/write_s"] + line["publish/digest_s"]
