"""The reward workers of a planning problem: how long one takes for a sample, as probes measured it or a person says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from console.config.config import RunConfig
from console.config.reward_settings import RewardDocument
from console.probe.probe_file import Probe
from console.probe.reward_samples import elsewhere, reward_name, takes_time
from penstock.config import Document


def reward_section(
    probes: Sequence[Probe], run: RunConfig | None, *, stated: float | None, missing: list[str], notes: list[str]
) -> Document:
    """Key `reward` of the workload, or nothing where rewards never limit a plan; asks for what no probe measured.

    Args:
        probes: The inventory.
        run: Whose reward it is; without one nothing is asked for.
        stated: Samples per second of one worker, in place of what was measured.
        missing: What is asked for is added.
        notes: What to know about it is added.
    """
    if stated is not None:
        return {"reward": {"seconds_per_sample": 1 / stated}}
    settings = None if run is None else RewardDocument(reward=run.reward, sources=run.source_rewards)
    measured = [(probe, probe.reward) for probe in probes if probe.reward is not None]
    if settings is not None:
        name = reward_name(settings)
        others = {reward.model for _, reward in measured} - {name}
        measured = [(probe, reward) for probe, reward in measured if reward.model == name]
        if not measured and takes_time(settings):
            missing.append(_asked(name, others, elsewhere(settings)))
    if not measured:
        return {}
    rates: dict[str, list[float]] = defaultdict(list)
    for probe, reward in measured:
        rates["default"].append(reward.samples_per_second)
        if probe.accelerators is not None:
            rates[probe.accelerators.kind].append(reward.samples_per_second)
    if answers := [probe.name for probe, reward in measured if reward.completions == "answers"]:
        notes.append(
            f"{', '.join(answers)} measured the reward with rows' answers in place of completions, which may take "
            "longer; penstock probe --reward RUN.yaml --data RECORDING measures with those of a run"
        )
    return {
        "reward": {
            "seconds_per_sample": {kind: 1 / median(each) for kind, each in rates.items()},
            "memory_GB": max(reward.memory_GB for _, reward in measured),
        }
    }


def _asked(name: str, others: set[str], endpoint: str) -> str:
    field = "workload.reward.seconds_per_sample"
    if endpoint:
        return (
            f"{field}: the rate of {endpoint} is its endpoint's; give --reward-rate, samples/s that one worker scores"
        )
    why = f"probes measured {', '.join(sorted(others))} and not {name}" if others else f"no probe measured {name}"
    return f"{field}: {why}; run penstock probe --reward RUN.yaml on a machine again, or give --reward-rate"
