"""Writes summary.json, a run's results, once at its end, however it ended.

Definitions:

- `samples_per_second` and `response_tokens_per_second`: trained samples and their completion tokens per second of the
  training phase (`training_wall_s`); `wall_s` is the whole run, loading and evaluation included. A resumed run's times
  continue from its checkpoint.
- `reward_first`, `reward_last`: means of `reward/mean` over the first and the last five steps.
- `overlap_ratio`, `generator_idle_ratio`, `trainer_idle_ratio`: see `services.trainer.reporting.overlap`.
- `trainer_waits_s`: seconds of the training phase in which the trainer waited, by cause
  (`services.trainer.reporting.stall_timer`); `pack_fill`: the mean part of their token budget that its forward passes
  used. Both over the steps of metrics.jsonl.
- `eval_*`: mean scores on held-out prompts at version 0 and at the last version measured after it.
- `sources`: some of these by named source.

Unknown values (nothing was measured, the broker was away) are null, never invented.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.process.durable_files import replace_file
from penstock.process.packages import ENGINE_PACKAGES, installed_version
from penstock.v1 import broker_pb2, trainer_pb2
from penstock.wire.audit_json import audit_document
from services.trainer.reporting.overlap import OverlapTotals
from services.trainer.reporting.progress import Progress
from services.trainer.reporting.stall_timer import Cause

REWARD_WINDOW_STEPS = 5
_PACKAGES = ("torch", "grpcio", "protobuf", "redis", "ortools")
_OUTCOMES = {
    trainer_pb2.RUN_OUTCOME_COMPLETED: "completed",
    trainer_pb2.RUN_OUTCOME_STOPPED: "stopped",
    trainer_pb2.RUN_OUTCOME_FAILED: "failed",
    trainer_pb2.RUN_OUTCOME_DRAINED: "drained",
}
Summary = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The inputs of a summary."""

    run_id: str
    seed: int
    outcome: trainer_pb2.RunOutcome.ValueType
    message: str
    max_staleness: int
    num_skipped_rows: int
    wall_s: float
    progress: Progress
    overlap: OverlapTotals
    steps: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl."""
    evaluations: Sequence[Mapping[str, Any]]
    """Lines of evaluations.jsonl."""
    sources: Sequence[str] = ()
    """Named sources of the run's data."""
    audit: broker_pb2.Audit | None
    """The broker's counters; None if it was unreachable."""


def build_summary(facts: RunFacts) -> Summary:
    """The document."""
    progress, overlap = facts.progress, facts.overlap
    rewards = [step["reward/mean"] for step in facts.steps]
    seen = progress.max_staleness_seen
    return {
        "run_id": facts.run_id,
        "seed": facts.seed,
        "outcome": _OUTCOMES[facts.outcome],
        "message": facts.message,
        "steps": progress.policy_version,
        "samples_trained": progress.num_samples,
        "response_tokens_trained": progress.num_response_tokens,
        "skipped_rows": facts.num_skipped_rows,
        "wall_s": facts.wall_s,
        "training_wall_s": overlap.phase_s,
        "samples_per_second": _rate(progress.num_samples, overlap.phase_s),
        "response_tokens_per_second": _rate(progress.num_response_tokens, overlap.phase_s),
        "reward_first": _mean(rewards[:REWARD_WINDOW_STEPS]),
        "reward_last": _mean(rewards[-REWARD_WINDOW_STEPS:]),
        **_accuracies(facts.evaluations),
        "sources": {name: _of_source(name, facts) for name in facts.sources},
        "overlap_ratio": overlap.overlap_ratio,
        "generator_idle_ratio": overlap.generator_idle_ratio,
        "trainer_idle_ratio": overlap.trainer_idle_ratio,
        "trainer_waits_s": {cause.value: _total(facts.steps, f"wait/{cause.value}_s") for cause in Cause},
        "pack_fill": _mean([step["step/pack_fill"] for step in facts.steps if "step/pack_fill" in step]),
        "max_staleness": facts.max_staleness,
        "max_staleness_seen": max(seen, facts.audit.max_staleness_seen) if facts.audit else seen,
        "audit": audit_document(facts.audit) if facts.audit else None,
        "versions": package_versions(),
    }


def restate_end(path: Path, outcome: trainer_pb2.RunOutcome.ValueType, message: str) -> str:
    """Update how the run ended in an existing summary; returns the text, empty if none can be read."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        summary |= {"outcome": _OUTCOMES[outcome], "message": message}
    except (OSError, ValueError, TypeError):
        return ""
    return write_summary(path, summary)


def write_summary(path: Path, summary: Summary) -> str:
    """Write the summary whole or not at all; returns the text."""
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    replace_file(path, text)
    return text


def package_versions() -> dict[str, str | None]:
    """Versions of the relevant packages as installed beside the trainer; None if not installed."""
    packages = {name: (name,) for name in _PACKAGES} | ENGINE_PACKAGES
    found = {name: installed_version(*candidates) for name, candidates in packages.items()}
    return {"penstock": penstock.__version__, "python": platform.python_version(), **found}


def _of_source(name: str, facts: RunFacts) -> Summary:
    """The same of one source: the first and the last five steps are those that had groups of it."""
    prefix = f"source/{name}/"
    rewards = [value for step in facts.steps if (value := step.get(f"{prefix}reward_mean")) is not None]
    return {
        "samples_trained": int(_total(facts.steps, f"{prefix}samples")),
        "reward_first": _mean(rewards[:REWARD_WINDOW_STEPS]),
        "reward_last": _mean(rewards[-REWARD_WINDOW_STEPS:]),
        **_accuracies(facts.evaluations, prefix),
    }


def _accuracies(evaluations: Sequence[Mapping[str, Any]], prefix: str = "") -> Summary:
    nothing: Mapping[str, Any] = {}
    start = next((line for line in evaluations if line["policy_version"] == 0), nothing)
    end = next((line for line in reversed(evaluations) if line["policy_version"] > 0), nothing)
    return {
        "eval_accuracy_start": start.get(f"{prefix}sampled_accuracy"),
        "eval_accuracy_end": end.get(f"{prefix}sampled_accuracy"),
        "eval_greedy_start": start.get(f"{prefix}greedy_accuracy"),
        "eval_greedy_end": end.get(f"{prefix}greedy_accuracy"),
        "eval_prompts": end.get(f"{prefix}num_prompts", start.get(f"{prefix}num_prompts")),
    }


def _total(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(step.get(name, 0.0) for step in steps)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
