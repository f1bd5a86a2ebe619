"""Compares dispatch decisions and leases on long and short queues, without sockets or a store.

penstock bench dispatch.depth [--samples N] [--repetitions N] [--json]

Times are medians over decisions that give leases, at most eight each, to a generator among eight, deep and short queue
in turn; `review` is the time of one review of the deep queue, which the broker runs in a thread: under `auto` a look
ahead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from dataclasses import replace

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.calibration import normal
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import DispatchPolicy
from services.broker.fleet.deal_round import Seat
from services.broker.fleet.dealer import Dealer
from services.broker.fleet.snapshot import Fleet, GeneratorStatus, SeenLengths, prompts_in_slices
from services.broker.operations import leasing, submission
from services.broker.operations.leasing import GeneratorFacts, Grant
from services.broker.operations.lifecycle import create_run
from services.broker.state.run_state import RunState

POLICIES = ("fifo", "least_loaded", "lpt", "streamrl", "auto")
GROUP_SIZE = 8
NUM_LEASES = 8
SHORT_SAMPLES = 1_000
NUM_GENERATORS = 8
DECISIONS_PER_TURN = 8


class Queue:
    """A run with this many queued samples, each group with a forecast, and a fleet that asks."""

    def __init__(self, num_samples: int) -> None:
        self._state = _state_of(num_samples // GROUP_SIZE)
        self._now_s = 0.0
        self._suffixes = (f"{number:06x}" for number in itertools.count())
        self._fleet = Fleet(
            SeenLengths(mean_tokens=1500.0, error=0.3, calibration=normal(shared_error=0.2, own_error=0.22))
        )
        self._dealer = Dealer(self._fleet)
        model = LatencyModel(max_samples=256)
        self._statuses = {
            f"gen-{index}": GeneratorStatus(
                generator_id=f"gen-{index}",
                model=model.scaled(1.0 + index / 4),
                num_free=NUM_LEASES,
                max_context_tokens=1 << 20,
                is_speed_known=True,
            )
            for index in range(NUM_GENERATORS)
        }
        self._facts = GeneratorFacts(
            generator_id="gen-0", policy_version=0, max_context_tokens=1 << 20, longest_context_tokens=1 << 20
        )
        self._seats = {"gen-0": Seat(self._facts, num_free=NUM_LEASES)}

    def review_s(self, policy: DispatchPolicy) -> float:
        """Time of one review."""
        loads = self._fleet.loads(self._state, self._statuses, self._now_s)
        prompts = list(itertools.chain.from_iterable(prompts_in_slices(self._state)))
        situation = self._fleet.situation_of(self._state, self._statuses, loads, min(loads))
        situation = replace(situation, prompts=prompts).copy()
        start_s = time.perf_counter()
        policy.review(situation)
        return time.perf_counter() - start_s

    def decide_s(self, policy: DispatchPolicy) -> float | None:
        """Time of one reply to a generator that asks; None where the policy leaves the work to others."""
        self._now_s += 0.05
        start_s = time.perf_counter()
        grants = self._grants(policy)
        self._state.settle()
        took_s = time.perf_counter() - start_s
        return took_s if grants else None

    def _grants(self, policy: DispatchPolicy) -> list[Grant]:
        if policy.needs_situation:
            dealt = self._dealer.deal(
                self._state,
                policy,
                self._seats,
                lambda: self._statuses,
                self._now_s,
                make_suffix=lambda: next(self._suffixes),
                longest_context_tokens=1 << 20,
            )
            if dealt is not None:
                return [grant for grants in dealt.grants.values() for grant in grants]
        found = leasing.lease(
            self._state,
            self._facts,
            max_leases=NUM_LEASES,
            now_s=self._now_s,
            make_suffix=lambda: next(self._suffixes),
        )
        return found.grants

    def put_back(self) -> None:
        """Let every lease expire."""
        self._now_s += 7200.0
        leasing.expire(self._state, self._now_s)
        self._state.settle()


def _state_of(num_groups: int) -> RunState:
    rng = random.Random(0)
    state = RunState()
    limits = broker_pb2.RunLimits(
        groups_per_step=65_536,
        group_size=GROUP_SIZE,
        max_staleness=8,
        max_queued_groups=num_groups,
        max_completion_tokens=1 << 14,
        max_leases_per_sample=1_000,
    )
    limits.generation_lease.FromSeconds(3600)
    create_run(state, broker_pb2.OpenRunRequest(run_id="deep", limits=limits), 0.0)
    for first in range(0, num_groups, 1_000):
        prompts = [
            types_pb2.Prompt(
                group_id=f"g{number}",
                token_ids=bytes(64),
                group_size=GROUP_SIZE,
                sampling=types_pb2.SamplingParams(max_new_tokens=1 << 14),
                purpose=types_pb2.PURPOSE_TRAIN,
            )
            for number in range(first, min(num_groups, first + 1_000))
        ]
        forecasts = {prompt.group_id: min(16_000.0, rng.lognormvariate(7.0, 0.8)) for prompt in prompts}
        errors = submission.submit(state, prompts, retired=(), now_s=0.0, forecasts=forecasts)
        if errors:
            raise RuntimeError(f"a prompt was refused: {errors[0].message}")
        state.settle()
    return state


def main() -> int:
    options = _options()
    queues = {"short": Queue(SHORT_SAMPLES), "deep": Queue(options.samples)}
    found: dict[str, dict[str, float]] = {}
    for name in POLICIES:
        times_s: dict[str, list[float]] = {depth: [] for depth in queues}
        policies = {depth: make_policy(name) for depth in queues}
        reviews_s = {depth: queue.review_s(policies[depth]) for depth, queue in queues.items()}
        for _ in range(options.repetitions):
            for depth, queue in queues.items():
                decided = [queue.decide_s(policies[depth]) for _ in range(DECISIONS_PER_TURN)]
                times_s[depth] += [took_s for took_s in decided if took_s is not None]
                queue.put_back()
        medians = {depth: statistics.median(values) for depth, values in times_s.items()}
        found[name] = {
            "short_ms": 1e3 * medians["short"],
            "deep_ms": 1e3 * medians["deep"],
            "ratio": medians["deep"] / medians["short"],
            "review_ms": 1e3 * reviews_s["deep"],
        }
        if not options.json:
            print(name, " ".join(f"{key} {value:.2f}" for key, value in found[name].items()), flush=True)
    if options.json:
        print(json.dumps(found))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
