"""Measures what a lease costs a broker at the start of a step, for fleets of every size.

penstock bench broker.leases [--generators N ...] [--dispatch NAME] [--json]

Every generator is idle with 64 free slots, the admission window is full of queued prompts with forecasts, and rounds
follow each other until all hold 64. The broker's own decision code runs, without sockets and without a store; the run's
clock advances with the time that it takes. Times are CPU time of the thread, so that they hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.clock import ManualClock
from penstock.v1 import broker_pb2, types_pb2
from services.broker.fleet.deal_round import Seat
from services.broker.fleet.dispatcher import Dispatcher
from services.broker.fleet.worker_registry import CONTEXT_GRACE_S, Peers
from services.broker.operations import submission
from services.broker.operations.leasing import GeneratorFacts
from services.broker.operations.lifecycle import create_run
from services.broker.records.run_clock import RunClock
from services.broker.records.store import Delta
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore

FLEETS = (8, 64, 256, 1024)
NUM_SLOTS = 64
GROUP_SIZE = 8
MAX_TOKENS = 32_768
MAX_CONTEXT_TOKENS = 40_000
RUN = "leases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost for one fleet."""

    us_per_lease: float
    """CPU time of all rounds, without commits, over the leases given."""
    max_stall_ms: float
    """CPU time of the longest round."""
    num_rounds: int
    num_leases: int


def measure(num_generators: int, *, dispatch: str) -> Cost:
    """Fill an idle fleet."""
    clock = ManualClock()
    state = _state_of(num_generators * NUM_SLOTS // GROUP_SIZE, dispatch)
    peers = asyncio.run(_peers_of(num_generators, clock))
    clock.advance(CONTEXT_GRACE_S + 0.5)
    dispatcher = Dispatcher(peers)
    seats = {_name(number): _seat(number) for number in range(num_generators)}
    # As in a broker process (`services.broker.server`).
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    suffixes = (f"{number:06x}" for number in itertools.count())
    times_s: list[float] = []
    num_leases = 0
    while state.queue:
        asking = next(name for name, seat in seats.items() if seat.num_free)
        begin_s = time.thread_time()
        deal = dispatcher.deal(state, asking, seats, clock.now_s(), make_suffix=lambda: next(suffixes))
        for name, grants in deal.grants.items():
            seats[name].num_free -= len(grants)
            num_leases += len(grants)
        times_s.append(time.thread_time() - begin_s)
        state.settle()
        clock.advance(times_s[-1])
    return Cost(
        us_per_lease=1e6 * sum(times_s) / num_leases,
        max_stall_ms=1e3 * max(times_s),
        num_rounds=len(times_s),
        num_leases=num_leases,
    )


def _name(number: int) -> str:
    return f"gen-{number:04}"


def _seat(number: int) -> Seat:
    facts = GeneratorFacts(generator_id=_name(number), policy_version=0, max_context_tokens=MAX_CONTEXT_TOKENS)
    return Seat(facts, num_free=NUM_SLOTS)


async def _peers_of(num_generators: int, clock: ManualClock) -> Peers:
    store = MemoryStore()
    await store.commit(RUN, None, Delta(run=b""))
    peers = Peers(RUN, store=store, clock=RunClock(clock))
    for number in range(num_generators):
        profile = broker_pb2.GeneratorProfile(
            max_concurrent_samples=NUM_SLOTS, step_base_s=0.0085, step_per_sample_s=0.00005
        )
        hello = broker_pb2.GeneratorHello(
            run_id=RUN, generator_id=_name(number), max_context_tokens=MAX_CONTEXT_TOKENS, profile=profile
        )
        peers.see_generator(hello, broker_pb2.GeneratorBeat(credit_total=NUM_SLOTS), num_free=NUM_SLOTS)
    return peers


def _state_of(num_groups: int, dispatch: str) -> RunState:
    """A run with this many groups queued, all of which may start."""
    rng = random.Random(0)
    state = RunState()
    limits = broker_pb2.RunLimits(
        groups_per_step=num_groups // 2,
        group_size=GROUP_SIZE,
        max_staleness=1,
        max_queued_groups=num_groups,
        max_completion_tokens=MAX_TOKENS,
    )
    limits.generation_lease.FromSeconds(15)
    policy = broker_pb2.RunPolicy(dispatch=dispatch)
    create_run(state, broker_pb2.OpenRunRequest(run_id=RUN, limits=limits, policy=policy), 0.0)
    for first in range(0, num_groups, 1_000):
        _submit(state, range(first, min(num_groups, first + 1_000)), rng)
    return state


def _submit(state: RunState, numbers: Sequence[int], rng: random.Random) -> None:
    prompts = [
        types_pb2.Prompt(
            group_id=f"g{number}",
            token_ids=bytes(64),
            group_size=GROUP_SIZE,
            sampling=types_pb2.SamplingParams(max_new_tokens=MAX_TOKENS, temperature=1.0),
            purpose=types_pb2.PURPOSE_TRAIN,
        )
        for number in numbers
    ]
    forecasts = {prompt.group_id: min(30_000.0, rng.lognormvariate(8.0, 0.8)) for prompt in prompts}
    errors = submission.submit(state, prompts, retired=(), now_s=0.0, forecasts=forecasts)
    if errors:
        raise RuntimeError(f"a prompt was refused: {errors[0].message}")
    state.settle()


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, nargs="+", default=list(FLEETS))
    parser.add_argument("--dispatch", default="lpt")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for size in options.generators:
        cost = found[str(size)] = asdict(measure(size, dispatch=options.dispatch))
        if not options.json:
            print(size, " ".join(f"{key} {value:.1f}" for key, value in cost.items()), flush=True)
    if options.json:
        print(json.dumps({"leases": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
