"""Measures in-flight updates on a real vLLM engine, and its best concurrency: `penstock bench generator`."""

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
from benchmarks.generator.compared import compared
from benchmarks.generator.engine_process import EnginePlan
from benchmarks.generator.kv_pressure import MAX_CONTEXT, WINDOW_TIMEOUT_S, PressurePlan
from benchmarks.generator.model import UPDATE_SCALE, make_model
from benchmarks.group_end import run_group
from benchmarks.scratch import scratch_folder
from services.generator.engine.engine import UpdateMode

Result = dict[str, Any]
Progress = Callable[[str], None]
START_AND_END_TIMEOUT_S = 300.0
NUM_VERSION_FILES = 6
PARTS = ("updates", "pressure", "concurrency")
"""In-flight updates and concurrency on a real engine; concurrency on an emulated GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    num_engines: int
    num_cycles: int
    window_s: float
    update_interval_s: float
    max_replayed: int
    """Samples of each engine and mode whose log-probs are recomputed."""
    workloads: Sequence[concurrency.Workload]
    fixed_settings: Sequence[int]
    pressure: PressurePlan


FULL = Plan(
    num_engines=2,
    num_cycles=10,
    window_s=15.0,
    update_interval_s=3.0,
    max_replayed=150,
    workloads=concurrency.WORKLOADS,
    fixed_settings=concurrency.FIXED_SETTINGS,
    pressure=PressurePlan(
        fixed_settings=(20, 24, 28, 32, 36, 40, 48, 64), num_repetitions=3, num_samples=500, kv_cache_gib=0.024
    ),
)
QUICK = Plan(
    num_engines=1,
    num_cycles=1,
    window_s=3.0,
    update_interval_s=0.6,
    max_replayed=30,
    workloads=(concurrency.SMALL_WORKLOAD,),
    fixed_settings=(16, 48, 96),
    pressure=PressurePlan(fixed_settings=(16, 32), num_repetitions=1, num_samples=80, kv_cache_gib=0.024),
)


async def run(plan: Plan, *, progress: Progress, parts: Sequence[str] = PARTS) -> Result:
    """Measure these parts; `progress` receives status messages."""
    result: Result = {"settings": {**asdict(plan), "workloads": [workload.name for workload in plan.workloads]}}
    if "updates" in parts:
        result |= await _updates(plan, progress)
    result["concurrency"] = {}
    if "pressure" in parts:
        result["concurrency"]["vLLM on a CPU"] = await _pressure(plan.pressure, progress)
    if "concurrency" in parts:
        for workload in plan.workloads:
            progress(f"concurrency: {workload.name}")
            result["concurrency"][workload.name] = await asyncio.to_thread(_sweep, workload, plan.fixed_settings)
    return result


async def _updates(plan: Plan, progress: Progress) -> Result:
    result: Result = {"update_scale": UPDATE_SCALE}
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
    return result


async def _pressure(plan: PressurePlan, progress: Progress) -> Result:
    num_windows = plan.num_repetitions * (1 + len(plan.fixed_settings))
    progress(f"concurrency of a real engine: {num_windows} times {plan.num_samples} samples")
    with scratch_folder() as folder:
        model_path, result_path = folder / "model", folder / "pressure.json"
        await asyncio.to_thread(make_model, model_path, num_versions=1, max_context=MAX_CONTEXT)
        arguments = [str(model_path), str(result_path), json.dumps(asdict(plan))]
        timeout_s = START_AND_END_TIMEOUT_S + num_windows * WINDOW_TIMEOUT_S
        await run_group("benchmarks.generator.kv_pressure", *arguments, timeout_s=timeout_s)
        document: Result = json.loads(await asyncio.to_thread(result_path.read_text, encoding="utf-8"))
    windows = document.pop("windows")
    swept = {number: _over_repetitions(windows, number) for number in plan.fixed_settings}
    return document | compared(_over_repetitions(windows, None), swept, rate="tokens_per_cpu_second")


def _over_repetitions(windows: Sequence[Result], fixed: int | None) -> dict[str, float]:
    """Medians of one setting's numbers; preemptions are rare, so their mean."""
    own = [window for window in windows if window["fixed"] == fixed]
    medians = {name: statistics.median(window[name] for window in own) for name in own[0].keys() - {"fixed"}}
    return medians | {"preempted_share": statistics.fmean(window["preempted_share"] for window in own)}


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
    """Whether updates arrived while it was decoded, all in this mode."""
    versions = sample["versions"]
    taken = {modes[version] for version in range(versions[0] + 1, versions[-1] + 1)} if versions else set()
    return taken == {mode}


def _mean(parts: Sequence[np.ndarray]) -> float:
    joined = np.concatenate(list(parts))
    return float(joined.mean()) if len(joined) else 0.0


def _sweep(workload: concurrency.Workload, fixed_settings: Sequence[int]) -> Result:
    rule = asdict(concurrency.simulate(workload, fixed=None))
    swept = {number: asdict(concurrency.simulate(workload, fixed=number)) for number in fixed_settings}
    return compared(rule, swept, rate="tokens_per_second")
