"""Words what limits a run and what would help, in at most three sentences, each with the numbers behind it.

A rule looks at one cause and keeps silent below a bound at which a change would hardly be felt; the largest share of
time or samples at stake comes first. What a change would bring is a bound by arithmetic, never a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from console.advice.measured import Measured

MAX_SENTENCES = 3
WAIT = 0.25
"""Share of the time from which waiting for samples or a critic counts."""
PAUSE = 0.1
"""The same of publishing and checkpointing, which cost nothing in a run that is set up well."""
IDLE = 0.3
"""Share of time from which generators count as idle."""
SCORING = 0.5
"""Share of the unscored samples that wait for their score, from which scoring holds the run up."""
TAIL = 3.0
"""Longest over mean completion of a step, from which its longest samples count as a tail."""
NO_SIGNAL = 0.7
"""Share of the groups without a difference in reward, from which the data count as too easy or too hard."""
DROPPED = 0.05
"""Share of a run's samples dropped for one reason, from which that counts."""
LOW_FILL = 0.5
"""Part of the token budget that forward passes use, below which it counts as wasted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A cause and its cure."""

    text: str
    """One sentence."""
    numbers: Mapping[str, float]
    """What it rests on."""
    stake: float
    """Share of time or samples that is at stake, 0 to 1."""


def advise(measured: Measured | None) -> list[Advice]:
    """What to change, the most worthwhile first; empty when nothing is wrong or too little was measured."""
    if measured is None:
        return []
    found = [advice for rule in _RULES for advice in rule(measured)]
    return sorted(found, key=lambda advice: -advice.stake)[:MAX_SENTENCES]


def _samples(run: Measured) -> Iterator[Advice]:
    """The trainer waits for samples: for their scores, for each other, or for the generators."""
    share = run.wait_shares.get("samples", 0.0)
    if share < WAIT:
        return
    waited = f"the trainer waited {_percent(share)} of the time for samples"
    numbers = {"wait_share": share}
    if run.scoring_share is not None and run.scoring_share >= SCORING:
        yield Advice(
            text=f"{waited}, and {_percent(run.scoring_share)} of the unscored ones were waiting for their score: "
            "add reward workers, or raise reward.max_concurrent_batches",
            numbers={**numbers, "scoring_share": run.scoring_share},
            stake=share,
        )
    elif run.generators_idle is not None and run.generators_idle >= IDLE and run.max_staleness is not None:
        numbers |= {"generators_idle": run.generators_idle, "max_staleness": run.max_staleness}
        yield Advice(
            text=f"{waited} while generators were idle for {_percent(run.generators_idle)}: each waits for the other"
            f"{_tail(run, numbers)}; raise algorithm.max_staleness from {run.max_staleness} to {run.max_staleness + 1}",
            numbers=numbers,
            stake=share,
        )
    elif run.generators_idle is not None and run.num_generators:
        # Generators that are busy throughout bound the rate; the trainer does once it never waits.
        more = 1 + 1 / run.num_generators
        gain = min(more, 1 / (1 - share) if share < 1 else more) - 1
        numbers |= {"generators_idle": run.generators_idle, "num_generators": run.num_generators, "gain_at_most": gain}
        yield Advice(
            text=f"{waited} while {_generators(run.num_generators)} decoded {_percent(1 - run.generators_idle)} of it: "
            f"add a generator (at most +{100 * gain:.0f} %)",
            numbers=numbers,
            stake=share,
        )


def _tail(run: Measured, numbers: dict[str, float]) -> str:
    if not run.length_mean or run.length_max is None or run.length_max < TAIL * run.length_mean:
        return ""
    numbers |= {"length_mean": run.length_mean, "length_max": run.length_max}
    return f", mostly for the longest samples ({run.length_max:.0f} tokens, {run.length_mean:.0f} on average)"


def _spare_generators(run: Measured) -> Iterator[Advice]:
    """The trainer never waits and generators do: some could go."""
    if run.generators_idle is None or run.num_generators < 2 or run.wait_shares.get("samples", 0.0) >= PAUSE / 2:
        return
    num_spare = int(run.num_generators * run.generators_idle)
    if run.generators_idle >= IDLE and num_spare:
        yield Advice(
            text=f"{_generators(run.num_generators)} were idle for {_percent(run.generators_idle)} and the trainer "
            f"never waited: {num_spare} of them could go, or the trainer needs more processes",
            numbers={"generators_idle": run.generators_idle, "num_generators": run.num_generators},
            stake=run.generators_idle,
        )


def _pauses(run: Measured) -> Iterator[Advice]:
    """The trainer waits for itself: weights, checkpoints, a critic of its own."""
    for cause, bound, cure in (
        ("publishing", PAUSE, "write the run folder to a faster disk, or publish fewer bytes (lora, model.dtype)"),
        ("checkpointing", PAUSE, "raise run.checkpoint_every_steps, or write to a faster disk"),
        ("acknowledging", PAUSE, "look at the broker's load and at the network to it (penstock status)"),
        ("critic", WAIT, "give the critic a faster machine or more processes"),
    ):
        share = run.wait_shares.get(cause, 0.0)
        if share >= bound:
            text = f"the trainer waited {_percent(share)} of the time for {_NAMES.get(cause, cause)}: {cure}"
            yield Advice(text=text, numbers={"wait_share": share}, stake=share)


def _no_signal(run: Measured) -> Iterator[Advice]:
    """Most groups have no difference in reward, so nothing is learnt from them."""
    if run.zero_variance_share >= NO_SIGNAL:
        numbers = {"zero_variance_share": run.zero_variance_share}
        if run.reward_mean is not None:
            numbers["reward_mean"] = run.reward_mean
        mean = "" if run.reward_mean is None else f" (mean {run.reward_mean:.2f})"
        yield Advice(
            text=f"{_percent(run.zero_variance_share)} of the groups taught nothing: all their samples had one "
            f"reward{mean}; let such prompts rest (data.difficulty), or use other data",
            numbers=numbers,
            stake=run.zero_variance_share,
        )


_NAMES = {"critic": "its critic"}
_CURES = {
    "stale": "raise algorithm.max_staleness, or set policy.stale to wait",
    "too_many_leases": "see why generators die or fall silent (penstock status)",
    "group_incomplete": "set policy.partial_groups to shrink",
}


def _drops(run: Measured) -> Iterator[Advice]:
    """Samples that were generated and not trained on."""
    total = run.num_trained + sum(run.dropped.values())
    for reason, count in run.dropped.items():
        if total and count / total >= DROPPED and (cure := _CURES.get(reason)) is not None:
            yield Advice(
                text=f"{_percent(count / total)} of the samples were dropped ({reason}, {count}): {cure}",
                numbers={"dropped": count, "ended": total},
                stake=count / total,
            )


def _pack_fill(run: Measured) -> Iterator[Advice]:
    """A busy trainer computes with half-empty packs."""
    if run.pack_fill is not None and run.pack_fill < LOW_FILL and run.train_share >= 1 - WAIT:
        yield Advice(
            text=f"the trainer computed {_percent(run.train_share)} of the time, with packs filled to "
            f"{_percent(run.pack_fill)}: raise trainer.max_groups_per_microbatch",
            numbers={"train_share": run.train_share, "pack_fill": run.pack_fill},
            stake=run.train_share * (1 - run.pack_fill) / 2,
        )


_RULES: tuple[Callable[[Measured], Iterator[Advice]], ...] = (
    _samples,
    _spare_generators,
    _pauses,
    _no_signal,
    _drops,
    _pack_fill,
)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _generators(count: int) -> str:
    return "the generator" if count == 1 else f"{count} generators"
