"""Records the metrics of each step in metrics.jsonl: one JSON object per line, oldest first.

Promises:

- A line is whole or absent, and names its `policy_version` and `time` (Unix seconds).
- After a resume the file holds exactly the steps of the surviving history: lines after the resumed version are removed.

Keys: reward/{mean,std}; component/NAME, means of the reward's components; length/{mean,max} in completion tokens;
staleness/{min,mean,max} in versions;
throughput/{samples_per_second,response_tokens_per_second} over the step's wall time;
time/{step_s,train_s,idle_s,publish_s} since the step before;
wait/{samples,acknowledging,publishing,checkpointing,critic}_s, the parts of that in which the trainer waited for
these; publish/pause_share, wait/publishing_s over time/step_s;
publish/{offer_s,write_s,digest_s,bytes} of the version offered last: from the end of its optimiser step until it was
offered, and what of that was writing its file and digesting it; step/pack_fill, tokens over the token budget of the
step's forward passes; step/{samples,groups,response_tokens,zero_variance_groups,skipped_samples};
step/skipped_attempts, how often the step was begun before and given up for a loss or gradient that was not finite;
optimizer/{grad_norm,learning_rate}; loss/* as the loss names them (per-token means and maxima: ratio, ratio_max,
clip_fraction, entropy, mismatch_kl, importance_weight). Of each source with a name: source/NAME/{groups,samples,
reward_mean,pass_rate,length_mean,length_max,zero_variance_share} of the step, and {share,epoch,resting_rows}, where the
order of its prompts is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from penstock.process.durable_files import replace_file
from services.trainer.publishing.written_weights import OfferTimes
from services.trainer.reporting.stall_timer import Cause
from services.trainer.reporting.trackers import Trackers
from services.trainer.step.step_report import StepReport

STEPS = Counter("penstock_trainer_steps", "Optimiser steps taken")
SAMPLES = Counter("penstock_trainer_samples", "Samples trained on")
SKIPPED = Counter("penstock_trainer_skipped_samples", "Samples left out of a step", ["reason"])
SKIPPED_STEPS = Counter("penstock_trainer_skipped_steps", "Steps begun again without the groups at fault", ["reason"])
WAITS = Counter("penstock_trainer_wait_seconds", "Time in which training waited, by what for", ["cause"])
IDLE = Counter("penstock_trainer_idle_seconds", "Time without anything to compute while training")
PAUSE_SHARE = Gauge("penstock_trainer_publish_pause_share", "Share of the last step spent waiting to publish")
OFFER_S = Gauge("penstock_trainer_offer_seconds", "From the end of an optimiser step until its version was offered")
POLICY_VERSION = Gauge("penstock_trainer_policy_version", "Version of the weights being trained")
STALENESS = Histogram(
    "penstock_trainer_staleness_versions", "Staleness of trained samples", buckets=(0, 1, 2, 4, 8, 16, 32)
)
SOURCE_SAMPLES = Counter("penstock_trainer_source_samples", "Samples trained on, by source of the data", ["source"])
SOURCE_REWARD = Gauge("penstock_trainer_source_reward_mean", "Mean reward of a source in its last step", ["source"])
SOURCE_PASS_RATE = Gauge(
    "penstock_trainer_source_pass_rate", "Share of a source's last samples that passed", ["source"]
)

Line = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How the wall time since the previous step was spent, seconds."""

    step_s: float
    train_s: float
    """Work of the compute thread, without its waits for a critic."""
    publish_s: float
    """Writing and digesting the previous version, during the step."""
    waits_s: Mapping[Cause, float] = field(default_factory=dict)
    """Waits of training, by cause."""
    offer: OfferTimes | None = None
    """Of the version offered last."""

    @property
    def idle_s(self) -> float:
        """Time in which the compute thread had nothing to do."""
        return max(0.0, self.step_s - self.train_s)

    def publishing(self) -> Line:
        """The metrics of publishing."""
        line = {}
        if self.step_s > 0:
            line["publish/pause_share"] = self.waits_s.get(Cause.PUBLISHING, 0.0) / self.step_s
        if (offer := self.offer) is not None:
            line |= {
                "publish/offer_s": offer.offer_s,
                "publish/write_s": offer.write_s,
                "publish/digest_s": offer.digest_s,
                "publish/bytes": float(offer.num_bytes),
            }
        return line


def step_line(report: StepReport, times: StepTimes, *, policy_version: int, now_s: float) -> Line:
    """The metrics of the step that produced `policy_version`."""
    num_tokens = report.num_completion_tokens
    line = {
        "policy_version": float(policy_version),
        "time": now_s,
        "reward/mean": report.reward_mean,
        "reward/std": report.reward_std,
        "length/mean": num_tokens / report.num_samples,
        "length/max": float(report.max_completion_tokens),
        "staleness/min": float(min(report.staleness)),
        "staleness/mean": sum(report.staleness) / report.num_samples,
        "staleness/max": float(max(report.staleness)),
        "throughput/samples_per_second": report.num_samples / times.step_s if times.step_s > 0 else 0.0,
        "throughput/response_tokens_per_second": num_tokens / times.step_s if times.step_s > 0 else 0.0,
        "time/step_s": times.step_s,
        "time/train_s": times.train_s,
        "time/idle_s": times.idle_s,
        "time/publish_s": times.publish_s,
        "step/samples": float(report.num_samples),
        "step/groups": float(report.num_groups),
        "step/response_tokens": float(num_tokens),
        "step/zero_variance_groups": float(report.num_zero_advantage_groups),
        "step/skipped_samples": float(len(report.skipped)),
        "optimizer/grad_norm": report.optimizer.grad_norm,
        "optimizer/learning_rate": report.optimizer.learning_rate,
    }
    if report.num_replayed_samples:
        line["step/replayed_samples"] = float(report.num_replayed_samples)
        line["staleness/replayed_max"] = float(report.replayed_staleness_max)
    line |= times.publishing()
    line |= {f"wait/{cause.value}_s": seconds for cause, seconds in times.waits_s.items()}
    if report.pack_fill is not None:
        line["step/pack_fill"] = report.pack_fill
    line |= {f"component/{name}": value for name, value in report.component_means.items()}
    for name, source in report.sources.items():
        line |= {f"source/{name}/{key}": value for key, value in source.metrics().items()}
    line |= {f"loss/{name}": value for name, value in report.loss_metrics.items()}
    return {name: value for name, value in line.items() if math.isfinite(value)}


def count_step(report: StepReport, times: StepTimes, *, policy_version: int) -> None:
    """Add a step to the process's Prometheus numbers."""
    STEPS.inc()
    SAMPLES.inc(report.num_samples)
    IDLE.inc(times.idle_s)
    for cause, seconds in times.waits_s.items():
        WAITS.labels(cause=cause.value).inc(max(0.0, seconds))
    POLICY_VERSION.set(policy_version)
    publishing = times.publishing()
    PAUSE_SHARE.set(publishing.get("publish/pause_share", 0.0))
    OFFER_S.set(publishing.get("publish/offer_s", 0.0))
    for name, source in report.sources.items():
        SOURCE_SAMPLES.labels(source=name).inc(source.num_samples)
        SOURCE_REWARD.labels(source=name).set(source.reward_mean)
        SOURCE_PASS_RATE.labels(source=name).set(source.pass_rate)
    for skipped in report.skipped:
        SKIPPED.labels(reason=skipped.reason.value).inc()
    for staleness in report.staleness:
        STALENESS.observe(staleness)


class JsonLines:
    """A file of JSON objects, one a line, each with a `policy_version`; its numbers go to trackers, too.

    A line that the disk refuses is kept, whole, until the disk takes it: see `flush`.

    Args:
        path: The file.
        prefix: Before the names that trackers are given.
    """

    def __init__(self, path: Path, *, prefix: str = "") -> None:
        self.trackers = Trackers({})
        self._path = path
        self._prefix = prefix
        self._unwritten: list[str] = []

    def append(self, line: Mapping[str, object]) -> None:
        """Add a line; its version is written as an integer. Raises OSError if writing fails, and then keeps the line.

        Trackers get its numbers in any case.
        """
        version = line["policy_version"]
        assert isinstance(version, int | float)
        numbers = {
            f"{self._prefix}{name}": float(value)
            for name, value in line.items()
            if isinstance(value, int | float) and name not in ("policy_version", "time")
        }
        self._unwritten.append(json.dumps({**line, "policy_version": int(version)}) + "\n")
        try:
            self.flush()
        finally:
            self.trackers.log(numbers, policy_version=int(version))

    def flush(self) -> None:
        """Write lines that failed earlier; call it before a checkpoint marks their steps as done.

        Raises OSError if writing fails again; nothing is left half written.
        """
        while self._unwritten:
            self._write(self._unwritten[0])
            del self._unwritten[0]

    def _write(self, text: str) -> None:
        size_bytes = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            with suppress(OSError):
                os.truncate(self._path, size_bytes)
            raise

    def read(self) -> list[dict[str, float]]:
        """Every complete line, oldest first; a last line that a crash truncated is left out."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def cut_after(self, policy_version: int) -> None:
        """Remove the lines after `policy_version`."""
        kept = [line for line in self.read() if line["policy_version"] <= policy_version]
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in kept))
