"""summary.json and metrics.jsonl: every promised key, null where nothing is known, cut after a resume."""

import json

import pytest

from penstock.v1 import broker_pb2, trainer_pb2
from services.trainer.reporting.metrics import JsonLines
from services.trainer.reporting.overlap import OverlapTotals
from services.trainer.reporting.progress import Progress
from services.trainer.reporting.summary import RunFacts, build_summary, package_versions, write_summary
from tests.helpers.full_disk import largest_file

PROMISED = {
    "steps", "samples_trained", "wall_s", "samples_per_second", "response_tokens_per_second", "reward_first",
    "reward_last", "eval_accuracy_start", "eval_accuracy_end", "eval_greedy_start", "eval_greedy_end", "overlap_ratio",
    "trainer_waits_s", "pack_fill",
    "generator_idle_ratio", "trainer_idle_ratio", "max_staleness", "max_staleness_seen", "audit", "versions",
}  # fmt: skip


def facts(**changes):
    values = {
        "run_id": "r",
        "seed": 1,
        "outcome": trainer_pb2.RUN_OUTCOME_COMPLETED,
        "message": "",
        "max_staleness": 2,
        "num_skipped_rows": 0,
        "wall_s": 30.0,
        "progress": Progress(policy_version=12, num_samples=200, num_response_tokens=4000, max_staleness_seen=1),
        "overlap": OverlapTotals(phase_s=20.0, trainer_busy_s=10.0, generator_busy_s=16.0, overlap_s=8.0),
        "steps": [
            {"reward/mean": float(step), "wait/samples_s": 0.5, "step/pack_fill": 0.9 + 0.1 * (step % 2)}
            for step in range(12)
        ],
        "evaluations": [
            {"policy_version": 0, "sampled_accuracy": 0.3, "greedy_accuracy": 0.5, "num_prompts": 8},
            {"policy_version": 6, "sampled_accuracy": 0.4, "greedy_accuracy": 0.5, "num_prompts": 8},
            {"policy_version": 12, "sampled_accuracy": 0.8, "greedy_accuracy": None, "num_prompts": 8},
        ],
        "audit": broker_pb2.Audit(
            submitted=208,
            trained=200,
            dropped={"stale": 8},
            balanced=True,
            max_staleness_seen=2,
            rows=[broker_pb2.AuditRow(submit_version=3, max_tokens=64, trained=200, dropped={"stale": 8})],
            submitted_by_version=[broker_pb2.SubmittedRow(submit_version=3, submitted=208)],
        ),
    }
    return RunFacts(**{**values, **changes})


def test_each_named_source_has_numbers_of_its_own():
    assert build_summary(facts())["sources"] == {}
    steps = [{"reward/mean": 1.0, "source/a/reward_mean": float(n), "source/a/samples": 4.0} for n in range(12)]
    steps[0] = {"reward/mean": 1.0}
    evaluations = [{"policy_version": 0, "source/a/sampled_accuracy": 0.25, "source/a/num_prompts": 8}]
    found = build_summary(facts(steps=steps, evaluations=evaluations, sources=("a", "b")))["sources"]
    nothing = dict.fromkeys(("reward_first", "reward_last", "eval_accuracy_start", "eval_accuracy_end"))
    nothing |= {"eval_greedy_start": None, "eval_greedy_end": None, "eval_prompts": None, "samples_trained": 0}
    assert found["b"] == nothing
    assert found["a"] == nothing | {
        "reward_first": 3.0, "reward_last": 9.0, "eval_accuracy_start": 0.25, "eval_prompts": 8, "samples_trained": 44,
    }  # fmt: skip


def test_every_promised_key_is_there_and_rates_are_of_the_training_phase():
    summary = build_summary(facts())
    assert summary.keys() >= PROMISED
    assert (summary["samples_per_second"], summary["response_tokens_per_second"]) == (10.0, 200.0)
    assert (summary["reward_first"], summary["reward_last"]) == (2.0, 9.0)
    assert (summary["overlap_ratio"], summary["trainer_idle_ratio"]) == (0.8, 0.5)
    assert (summary["eval_accuracy_start"], summary["eval_accuracy_end"], summary["eval_greedy_end"]) == (
        0.3,
        0.8,
        None,
    )
    waits = {"samples": 6.0, "acknowledging": 0, "publishing": 0, "checkpointing": 0, "critic": 0}
    assert summary["trainer_waits_s"] == waits
    assert round(summary["pack_fill"], 6) == 0.95
    assert summary["max_staleness_seen"] == 2
    assert summary["audit"] == {
        "submitted": 208, "trained": 200, "dropped": {"stale": 8}, "in_flight": 0, "balanced": True,
        "rows": [{"submit_version": 3, "max_tokens": 64, "trained": 200, "dropped": {"stale": 8}, "in_flight": 0}],
        "submitted_by_version": [{"submit_version": 3, "submitted": 208}],
    }  # fmt: skip


def test_what_is_not_known_is_null():
    nothing = facts(progress=Progress(), overlap=OverlapTotals(), steps=[], evaluations=[], audit=None)
    summary = build_summary(nothing)
    for key in ("samples_per_second", "reward_first", "eval_accuracy_start", "overlap_ratio", "audit"):
        assert summary[key] is None
    assert summary.keys() >= PROMISED


def test_versions_name_the_packages_that_matter():
    versions = package_versions()
    assert {"penstock", "python", "torch", "transformers", "vllm", "grpcio", "protobuf", "redis"} <= versions.keys()
    assert versions["torch"]


def test_the_file_holds_what_is_returned(tmp_path):
    text = write_summary(tmp_path / "summary.json", build_summary(facts()))
    assert (tmp_path / "summary.json").read_text() == text
    assert json.loads(text)["run_id"] == "r"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_lines_beyond_the_resumed_version_are_cut_and_half_lines_are_left_out(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    assert lines.read() == []
    lines.cut_after(0)
    for version in (1.0, 2.0, 3.0):
        lines.append({"policy_version": version, "reward/mean": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"policy_version": 4, "rew')
    assert [line["policy_version"] for line in lines.read()] == [1, 2, 3]
    lines.cut_after(2)
    lines.append({"policy_version": 3.0})
    assert [line["policy_version"] for line in lines.read()] == [1, 2, 3]


def test_a_line_that_a_full_disk_refuses_is_kept_whole_and_written_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.append({"policy_version": 1.0})
    size_bytes = path.stat().st_size
    with largest_file(size_bytes + 5):
        with pytest.raises(OSError, match="large"):
            lines.append({"policy_version": 2.0, "reward/mean": 0.5})
        with pytest.raises(OSError, match="large"):
            lines.flush()
        assert path.stat().st_size == size_bytes
    lines.flush()
    lines.flush()
    lines.append({"policy_version": 3.0})
    assert [line["policy_version"] for line in lines.read()] == [1, 2, 3]
