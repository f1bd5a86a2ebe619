"""`penstock bench generator`: what updates in flight cost a real vLLM engine, and what its concurrency should be."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generator import concurrency
from benchmarks.generator.engine_process import EnginePlan
from benchmarks.generator.model import UPDATE_SCALE, make_model
from benchmarks.group_end import run_group
from benchmarks.scratch import scratch_folder
from services.generator.engine import UpdateMode

Result = dict[str, Any]
Progress = Callable[[str], None]
START_AND_END_TIMEOUT_S = 300.0
NUM_VERSION_FILES = 6
CALM_SHARE = 0.02
"""Preemptions over samples under which a fixed setting counts as calm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    num_engines: int
    num_cycles: int
    window_s: float
    update_interval_s: float
    max_replayed: int
    """Samples of each engine and mode whose log-probs are computed again."""
    workloads: Sequence[concurrency.Workload]
    fixed_settings: Sequence[int]


FULL = Plan(
    num_engines=2,
    num_cycles=10,
    window_s=15.0,
    update_interval_s=3.0,
    max_replayed=150,
    workloads=concurrency.WORKLOADS,
    fixed_settings=concurrency.FIXED_SETTINGS,
)
QUICK = Plan(
    num_engines=1,
    num_cycles=1,
    window_s=3.0,
    update_interval_s=0.6,
    max_replayed=30,
    workloads=(concurrency.SMALL_WORKLOAD,),
    fixed_settings=(16, 48, 96),
)


async def run(plan: Plan, *, progress: Progress) -> Result:
    """Measure everything; `progress` hears what is going on."""
    result: Result = {"settings": {**asdict(plan), "workloads": [workload.name for workload in plan.workloads]}}
    with scratch_folder() as folder:
        model_path = folder / "model"
        await asyncio.to_thread(make_model, model_path, num_versions=NUM_VERSION_FILES)
        seconds = plan.num_cycles * 3 * plan.window_s
        progress(f"updates: {plan.num_engines} engines, about {seconds:.0f} s")
        engines = [_run_engine(model_path, folder / f"engine-{index}.json", plan, index) for index in _of(plan)]
        documents = await asyncio.gather(*engines)
        for mode in (UpdateMode.KEEP, UpdateMode.RECOMPUTE):
            progress(f"replaying samples that were updated in mode {mode}")
            result[mode] = await asyncio.to_thread(_judge, model_path, documents, mode, plan.max_replayed)
    result["settings"]["update_scale"] = UPDATE_SCALE
    result["concurrency"] = {}
    for workload in plan.workloads:
        progress(f"concurrency: {workload.name}")
        result["concurrency"][workload.name] = await asyncio.to_thread(_sweep, workload, plan.fixed_settings)
    return result


def _of(plan: Plan) -> Iterable[int]:
    return range(plan.num_engines)


async def _run_engine(model_path: Path, result_path: Path, plan: Plan, index: int) -> Result:
    engine_plan = EnginePlan(
        num_cycles=plan.num_cycles, window_s=plan.window_s, update_interval_s=plan.update_interval_s, seed=index
    )
    arguments = [str(model_path), str(result_path), json.dumps(asdict(engine_plan))]
    timeout_s = START_AND_END_TIMEOUT_S + (3 * plan.num_cycles + 1) * plan.window_s
    await run_group("benchmarks.generator.engine_process", *arguments, timeout_s=timeout_s)
    document: Result = json.loads(await asyncio.to_thread(result_path.read_text, encoding="utf-8"))
    return document


def _judge(model_path: Path, documents: Sequence[Result], mode: UpdateMode, max_replayed: int) -> Result:
    windows = [
        (plain, updated)
        for document in documents
        for plain, updated in zip(_windows(document, None), _windows(document, mode), strict=True)
    ]
    ratios = {
        name: [updated[of] / plain[of] for plain, updated in windows]
        for name, of in (("throughput_ratio", "tokens_per_second"), ("cpu_ratio", "tokens_per_cpu_second"))
    }
    pauses_s = [pause for _, updated in windows for pause in updated["pauses_s"]]
    return {
        **{name: statistics.median(found) for name, found in ratios.items()},
        "spread": {name: [min(found), max(found)] for name, found in ratios.items()},
        "tokens_per_second_without_updates": statistics.median(plain["tokens_per_second"] for plain, _ in windows),
        "num_updates": len(pauses_s),
        "pause_ms_p50": 1000 * statistics.median(pauses_s),
        "pause_ms_max": 1000 * max(pauses_s),
        "recomputed_tokens_per_update": sum(updated["num_recomputed_tokens"] for _, updated in windows) / len(pauses_s),
        "num_preemptions": sum(document["num_preemptions"] for document in documents),
        **_replay(model_path, documents, mode, max_replayed),
    }


def _windows(document: Result, mode: UpdateMode | None) -> list[Result]:
    return [window for window in document["windows"] if window["mode"] == mode]


def _replay(model_path: Path, documents: Sequence[Result], mode: UpdateMode, max_replayed: int) -> Result:
    from benchmarks.generator.replay import Replayer

    differences, gaps, stale = ([np.zeros(0)] for _ in range(3))
    num_samples, num_lost, num_over_an_update, num_replayed = 0, 0, 0, 0
    for document in documents:
        modes = {int(version): taken for version, taken in document["modes"].items()}
        files = {int(version): file for version, file in document["version_files"].items()}
        recomputed = frozenset(version for version, taken in modes.items() if taken == UpdateMode.RECOMPUTE)
        replayer = Replayer(model_path, files, recomputed)
        samples = document["samples"]
        num_samples += len(samples)
        num_lost += sum(not _is_whole(sample) for sample in samples)
        chosen = [sample for sample in samples if _lived_through(sample, modes, mode)]
        num_over_an_update += len(chosen)
        for sample in chosen[:: -(-len(chosen) // max_replayed) or 1]:
            context = sample["prompt"], sample["token_ids"], sample["versions"]
            behavior = np.asarray(sample["logprobs"])
            differences.append(np.abs(behavior - replayer.replayed(*context)))
            is_later = np.asarray(sample["versions"]) > sample["versions"][0]
            gaps.append(np.abs(behavior - replayer.fresh(*context))[is_later])
            before = [max(0, version - 1) for version in sample["versions"]]
            stale.append(np.abs(behavior - replayer.fresh(sample["prompt"], sample["token_ids"], before)))
            num_replayed += 1
    return {
        "num_samples": num_samples,
        "num_lost": num_lost,
        "num_samples_over_an_update": num_over_an_update,
        "num_replayed": num_replayed,
        "num_replayed_tokens": sum(len(part) for part in differences),
        "max_logprob_difference": float(np.concatenate(differences).max(initial=0.0)),
        "mean_gap_to_fresh_context": _mean(gaps),
        "max_gap_to_fresh_context": float(np.concatenate(gaps).max(initial=0.0)),
        "mean_difference_under_the_version_before": _mean(stale),
    }


def _is_whole(sample: Mapping[str, Any]) -> bool:
    counts = {len(sample[name]) for name in ("token_ids", "logprobs", "versions")}
    is_ordered = sample["versions"] == sorted(sample["versions"])
    return sample["finish_reason"] == "length" and counts == {sample["num_asked"]} and is_ordered


def _lived_through(sample: Mapping[str, Any], modes: Mapping[int, str], mode: UpdateMode) -> bool:
    """Whether updates came while it was decoded, all in this mode."""
    versions = sample["versions"]
    taken = {modes[version] for version in range(versions[0] + 1, versions[-1] + 1)} if versions else set()
    return taken == {mode}


def _mean(parts: Sequence[np.ndarray]) -> float:
    joined = np.concatenate(list(parts))
    return float(joined.mean()) if len(joined) else 0.0


def _sweep(workload: concurrency.Workload, fixed_settings: Sequence[int]) -> Result:
    adaptive = concurrency.simulate(workload, fixed=None)
    swept = {number: concurrency.simulate(workload, fixed=number) for number in fixed_settings}
    best = max(swept, key=lambda number: swept[number].tokens_per_second)
    calm = [number for number in swept if swept[number].preempted_share <= CALM_SHARE]
    best_calm = max(calm, key=lambda number: swept[number].tokens_per_second)
    return {
        "ratio_to_best_fixed": adaptive.tokens_per_second / swept[best].tokens_per_second,
        "ratio_to_best_calm_fixed": adaptive.tokens_per_second / swept[best_calm].tokens_per_second,
        "preempted_share": adaptive.preempted_share,
        "mean_samples": adaptive.mean_samples,
        "best_fixed": best,
        "best_fixed_preempted_share": swept[best].preempted_share,
        "best_calm_fixed": best_calm,
        "swept": {number: asdict(outcome) for number, outcome in swept.items()},
    }
