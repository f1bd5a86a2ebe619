"""Wall clocks that are set by a minute or an hour, either way: no service takes that for time that passed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from penstock.clients.broker import BrokerClient
from penstock.clients.scheduler.inventory import this_machine
from penstock.clock import ManualClock, SystemClock
from penstock.network.rpc import call, service_of
from penstock.process.busy_time import BusyTracker
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc, trainer_pb2, types_pb2
from penstock.wire.timestamps import timestamp
from services.broker.storage.memory_store import MemoryStore
from services.scheduler.config import LengthsConfig
from services.scheduler.replanning.replanner import GRACE_INTERVALS
from services.scheduler.server import make_forecaster
from services.scheduler.service import SchedulerServicer
from services.trainer.reporting.overlap import OverlapMeter
from services.trainer.run.monitor import RunMonitor
from tests.helpers.brokers.broker import RUN, Generator, eventually
from tests.helpers.brokers.broker import serving as broker_serving
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.plans.planned_fleet import INTERVAL_S, planned_fleet
from tests.helpers.serving import channel_to, serving
from tests.helpers.trainers.training import run_document, running_trainer
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

JUMPS_S = (60.0, -60.0, 3600.0, -3600.0)


@pytest.fixture(params=JUMPS_S, ids=lambda seconds: f"{seconds:+.0f}s")
def jump_s(request):
    return request.param


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


async def test_a_machine_counts_as_gone_after_missed_reports_and_not_after_a_jump(jump_s):
    clock = ManualClock()
    lengths = make_forecaster(LengthsConfig(), clock=clock, registry=CollectorRegistry())
    servicer = SchedulerServicer(clock=clock, heartbeat_interval_s=5.0, lengths=lengths)

    async with channel_to(service_of(servicer)) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def seen():
            [view] = (await call(stub.ListNodes, pb.ListNodesRequest(), peer="scheduler")).nodes
            return view.is_alive, clock.now_s() - view.report_time.ToMilliseconds() / 1000

        await call(stub.RegisterNode, pb.RegisterNodeRequest(node=this_machine(node_id="here")), peer="scheduler")
        clock.advance(10.0)
        clock.set_wall(jump_s)
        assert await seen() == (True, 10.0)
        clock.advance(5.1)
        assert await seen() == (False, pytest.approx(15.1))


async def test_machines_that_a_plan_waits_for_are_waited_for_across_a_jump():
    async with planned_fleet(registered=()) as fleet:
        await fleet.join("h20-new", "H20")
        await fleet.pass_time((GRACE_INTERVALS - 2) * INTERVAL_S)
        fleet.clock.set_wall(3600.0)
        waiting = await fleet.pass_time(INTERVAL_S)
        assert "h20-0" in {each.node_id for each in waiting.assignments}

        fleet.clock.set_wall(-3600.0)
        without = await fleet.pass_time(2 * INTERVAL_S)
        assert "h20-0" not in {each.node_id for each in without.assignments}


async def test_sessions_of_agents_and_groups_that_wait_for_siblings_outlive_a_jump(chat_model, jump_s):
    clock = ManualClock(time.time())
    times = {"session_idle_s": 30.0, "group_timeout_s": 30.0}
    async with endpoint_bench(chat_model, clock=clock, limits={"group_size": 3}, **times) as bench:
        for session in ("idle", "done", "done-too"):
            messages = [{"role": "user", "content": "go"}]
            await bench.client(session, "task").chat.completions.create(model="tiny", messages=messages)
        await bench.reward("done", 1.0)
        await bench.reward("done-too", 0.0)
        clock.set_wall(jump_s)
        clock.advance(20.0)
        # A look at what is idle comes before it says that nothing is left to put.
        assert await bench.endpoint._putter.wait_until_idle(timeout_s=30.0)
        assert not bench.outcomes

        begin_s = clock.now_s()
        clock.advance(11.0)
        await until(lambda: bench.outcomes["idle"] == 1 and bench.outcomes["put"] == 2)
        [group] = await bench.groups(1)
    sample = group.trajectories[0]
    assert begin_s - sample.submit_time.ToMicroseconds() / 1e6 == pytest.approx(20.0, abs=0.01)


class WrongClock(SystemClock):
    """A machine whose wall clock is ahead, or behind."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def now_s(self) -> float:
        """See `Clock`."""
        return time.time() + self._ahead_s


@pytest.mark.parametrize("generator_wrong_s", JUMPS_S)
@pytest.mark.parametrize("trainer_wrong_s", [0.0, 3600.0])
async def test_spans_of_a_generator_whose_clock_is_wrong_meet_those_of_its_trainer(generator_wrong_s, trainer_wrong_s):
    meter, clock = OverlapMeter(), WrongClock(trainer_wrong_s)
    async with broker_serving(MemoryStore()) as broker, BrokerClient(f"127.0.0.1:{broker.server.port}") as client:
        await broker.open()
        generator = Generator.connect(broker.channel)
        generator.beat(credits=1)
        context = SimpleNamespace(client=client, run_id=RUN, clock=clock, check_view=lambda view: None)
        monitor = RunMonitor(context=context, meter=meter, feeder=None)
        await monitor.poll()
        now_s = clock.monotonic_s()
        meter.begin(now_s - 200)
        meter.add_trainer_span(now_s - 100, now_s)
        meter.end(now_s)

        its_clock = ManualClock(time.time() + generator_wrong_s - 100)
        busy = BusyTracker(its_clock)
        busy.begin()
        its_clock.advance(40)
        its_clock.set_wall(-generator_wrong_s)
        its_clock.advance(60)
        spans = [
            types_pb2.TimeSpan(start_time=timestamp(start_s), end_time=timestamp(end_s))
            for start_s, end_s in busy.take_spans()
        ]
        generator.beat(credits=1, num_running=1, busy_spans=spans, now_time=timestamp(busy.now_s()))

        async def has_come():
            await monitor.poll()
            return meter.totals(now_s).generator_busy_s > 0

        await eventually(has_come)
    totals = meter.totals(now_s)
    assert totals.overlap_ratio > 0.5, totals


class LeapingClock(SystemClock):
    """Each look at the wall finds it set by ten days, forward and back in turn."""

    def __init__(self) -> None:
        self._num_looks = 0

    def now_s(self) -> float:
        """See `Clock`."""
        self._num_looks += 1
        return time.time() + (1e6 if self._num_looks % 2 else -1e6)


async def test_a_trainer_whose_wall_clock_leaps_trains_and_states_true_durations(tmp_path, model, one_thread):
    broker = ScriptedTrainingBroker()
    async with serving(broker.service()) as (_, target), running_trainer(clock=LeapingClock()) as trainer:
        run_dir = Path(await trainer.start(run_document(tmp_path, model, target)))
        finished = (await trainer.events())[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = [name for name in lines[0] if name.startswith(("time/", "wait/"))]
    seconds = {f"{name} of step {n}": line[name] for n, line in enumerate(lines) for name in names}
    summary = json.loads((run_dir / "summary.json").read_text())
    seconds |= {"wall": summary["wall_s"], "training wall": summary["training_wall_s"]}
    assert len(seconds) > len(lines)
    assert {name: value for name, value in seconds.items() if not 0 <= value < 1e5} == {}
