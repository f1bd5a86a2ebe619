"""What a lease costs a broker at the start of a step, for fleets of every size.

python -m benchmarks.broker.leases [--generators N ...] [--dispatch NAME] [--json]

Every generator is idle with 64 free slots, the admission window is full of queued prompts with forecasts, and all ask
at once, as their lease streams do: one after the other, again after `ASK_AGAIN_S` where dispatch left the rest to
others, until all hold 64. The broker's own decision code runs on a clock that stands still; there are no sockets and no
store. Times are CPU time of the thread, so that they hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import json
import random
import time
from dataclasses import asdict, dataclass

from penstock.clock import ManualClock
from penstock.v1 import broker_pb2, types_pb2
from services.broker import generation, submission
from services.broker.dispatcher import Dispatcher
from services.broker.generation import GeneratorFacts
from services.broker.lease_stream import ASK_AGAIN_S, MAX_LEASES_PER_ROUND, PACE_S
from services.broker.memory_store import MemoryStore
from services.broker.opening import create_run
from services.broker.peers import CONTEXT_GRACE_S, Peers
from services.broker.run_clock import RunClock
from services.broker.run_state import RunState
from services.broker.store import Delta

FLEETS = (8, 64, 256, 1024)
NUM_SLOTS = 64
GROUP_SIZE = 8
MAX_TOKENS = 32_768
MAX_CONTEXT_TOKENS = 40_000
RUN = "leases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one fleet."""

    us_per_lease: float
    """CPU time of all asks, commits left out, over the leases given."""
    max_stall_ms: float
    """CPU time of the longest single ask."""
    num_asks: int
    num_leases: int


def leases(fleets: tuple[int, ...] = FLEETS, *, dispatch: str = "lpt") -> dict[str, dict[str, float]]:
    """As in `penstock bench scale --json`: by size of the fleet."""
    return {
        str(size): {"us_per_lease": cost.us_per_lease, "max_stall_ms": cost.max_stall_ms}
        for size in fleets
        for cost in [measure(size, dispatch=dispatch)]
    }


def measure(num_generators: int, *, dispatch: str) -> Cost:
    """Fill an idle fleet."""
    clock = ManualClock()
    state = _state_of(num_generators * NUM_SLOTS // GROUP_SIZE, dispatch)
    peers = asyncio.run(_peers_of(num_generators, clock))
    clock.advance(CONTEXT_GRACE_S + 0.5)
    dispatcher = Dispatcher(peers)
    # As a broker process has it (`services.broker.server`).
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    suffixes = (f"{number:06x}" for number in itertools.count())
    start_s = clock.now_s()
    asks = [(start_s, number) for number in range(num_generators)]
    spent_s = longest_s = 0.0
    num_asks = num_leases = 0
    while asks and len(state.queue):
        now_s, number = heapq.heappop(asks)
        name = _name(number)
        free = NUM_SLOTS - len(state.generation_leases.get(name, ()))
        begun_s = time.thread_time()
        facts = GeneratorFacts(
            generator_id=name,
            policy_version=0,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            longest_context_tokens=peers.longest_context_tokens(),
        )
        found = generation.lease(
            state,
            facts,
            max_leases=min(free, MAX_LEASES_PER_ROUND),
            now_s=now_s,
            make_suffix=lambda: next(suffixes),
            choice=dispatcher.choose(state, facts, free, now_s),
        )
        dispatcher.note(name, is_left=not found.grants and found.reason == generation.LEFT_TO_OTHERS, now_s=now_s)
        peers.note_free(name, free - len(found.grants))
        took_s = time.thread_time() - begun_s
        state.settle()
        spent_s, longest_s = spent_s + took_s, max(longest_s, took_s)
        num_asks, num_leases = num_asks + 1, num_leases + len(found.grants)
        if len(found.grants) < free:
            is_left = not found.grants and found.reason == generation.LEFT_TO_OTHERS
            heapq.heappush(asks, (now_s + (ASK_AGAIN_S if is_left else PACE_S), number))
    return Cost(
        us_per_lease=1e6 * spent_s / num_leases,
        max_stall_ms=1e3 * longest_s,
        num_asks=num_asks,
        num_leases=num_leases,
    )


def _name(number: int) -> str:
    return f"gen-{number:04}"


async def _peers_of(num_generators: int, clock: ManualClock) -> Peers:
    store = MemoryStore()
    await store.commit(RUN, None, Delta(run=b""))
    peers = Peers(RUN, store=store, clock=RunClock(clock))
    for number in range(num_generators):
        hello = broker_pb2.GeneratorHello(
            run_id=RUN,
            generator_id=_name(number),
            max_context_tokens=MAX_CONTEXT_TOKENS,
            profile=broker_pb2.GeneratorProfile(
                max_concurrent_samples=NUM_SLOTS, step_base_s=0.0085, step_per_sample_s=0.00005
            ),
        )
        await peers.see_generator(hello, broker_pb2.GeneratorBeat(credit_total=NUM_SLOTS), num_free=NUM_SLOTS)
    return peers


def _state_of(num_groups: int, dispatch: str) -> RunState:
    """A run with that many groups queued, all of which may start."""
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
        prompts = [
            types_pb2.Prompt(
                group_id=f"g{number}",
                token_ids=bytes(64),
                group_size=GROUP_SIZE,
                sampling=types_pb2.SamplingParams(max_new_tokens=MAX_TOKENS, temperature=1.0),
                purpose=types_pb2.PURPOSE_TRAIN,
            )
            for number in range(first, min(num_groups, first + 1_000))
        ]
        forecasts = {prompt.group_id: min(30_000.0, rng.lognormvariate(8.0, 0.8)) for prompt in prompts}
        errors = submission.submit(state, prompts, retired=(), now_s=0.0, forecasts=forecasts)
        if errors:
            raise RuntimeError(f"a prompt was refused: {errors[0].message}")
        state.settle()
    return state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broker.leases", description=__doc__)
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
