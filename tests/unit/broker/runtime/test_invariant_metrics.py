"""Each invariant has a number that moves when the invariant has something to do, or is hurt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from penstock.v1 import broker_pb2, types_pb2
from services.broker.runtime import run_registry
from services.broker.runtime.invariant_metrics import InvariantMetrics
from services.broker.state.run_audit import audit
from tests.helpers.broker_model.generator import ModelGenerator
from tests.helpers.broker_model.process import MemoryBacking
from tests.helpers.broker_model.producer import ModelProducer
from tests.helpers.broker_model.trainer import ModelTrainer
from tests.helpers.broker_model.worker import ModelWorker
from tests.helpers.broker_model.world import Setting, World, settle
from tests.helpers.brokers.broker import limits
from tests.helpers.virtual_time import VirtualLoop
from tests.unit.broker.builders import acknowledge, deliver, make_ready, open_state

STOP = types_pb2.FINISH_REASON_STOP
SETTING = Setting(limits=limits(max_queued_groups=2, max_staleness=1), policy=broker_pb2.RunPolicy(dispatch="fifo"))


class Scene:
    """A broker with a run, and everybody around it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.world = World(MemoryBacking(), loop, SETTING, num_brokers=1)
        self.trainer, self.generator = ModelTrainer(self.world), ModelGenerator(self.world, 0)
        self.worker, self.producer = ModelWorker(self.world, 0), ModelProducer(self.world)

    def value(self, name: str, **labels: str) -> float:
        registry = self.world.brokers[0].registry
        return registry.get_sample_value(f"penstock_invariant_{name}", labels) or 0.0

    async def decode_all(self) -> None:
        self.generator.beat(slots=9)
        await settle()
        await self.generator.put(*[self.generator.decode(lease, 2, STOP) for lease in list(self.generator.held)])

    async def score_all(self) -> None:
        self.worker.ask(9)
        await settle()
        await self.worker.report(*[self.worker.judge(lease) for lease in list(self.worker.held)])


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.shut_down()


def test_repetitions_and_refusals_are_counted_by_kind(loop: VirtualLoop) -> None:
    async def play() -> Scene:
        scene = Scene(loop)
        await scene.trainer.open()
        await scene.trainer.submit(2)
        await scene.trainer.submit_again()
        assert len(await scene.trainer.submit(1)) == 1
        scene.generator.beat(slots=9)
        await settle()
        lease_id = next(iter(scene.generator.held))
        first = scene.generator.decode(lease_id, 3)
        await scene.generator.put(first)
        await scene.generator.put(first, are_new=False)
        gap, ahead = (scene.generator.decode(lease_id, 1) for _ in range(2))
        gap.offset += 1
        ahead.offset, ahead.policy_versions.versions = 3, (9).to_bytes(8, "little")
        await scene.generator.put(gap)
        scene.generator.beat(slots=9)
        await scene.generator.put(ahead)
        await scene.generator.die()
        return scene

    scene = loop.run_until_complete(play())
    assert scene.value("exactly_once_duplicates_total", kind="prompt") == 2
    assert scene.value("bounded_refusals_total", queue="prompts") == 1
    assert scene.value("exactly_once_duplicates_total", kind="chunk") == 1
    assert scene.value("no_token_twice_refused_tokens_total", reason="OFFSET_MISMATCH") == 1
    assert scene.value("attested_weights_refused_chunks_total") == 1


def test_a_runs_gauges_follow_it_and_later_repetitions_are_counted(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_registry, "OBSERVE_EVERY_S", 0.0)

    async def play() -> Scene:
        scene = Scene(loop)
        await scene.trainer.open()
        await scene.trainer.submit(2)
        await settle()
        assert scene.value("bounded_fill_ratio", run="run-1", queue="training prompts") == 1.0
        await scene.decode_all()
        await scene.score_all()
        await scene.worker.report(scene.worker.sent[0])
        scene.trainer.pull(2)
        await settle()
        # One of the two groups is of one sample; the run's largest have two.
        assert scene.value("bounded_fill_ratio", run="run-1", queue="step") == 0.75
        await scene.trainer.step()
        await scene.trainer.acknowledge()
        request = scene.producer.make(1, 0, is_equal=False)
        for _ in range(2):
            await scene.producer.put(request)
        scene.trainer.pull(1)
        await settle()
        await scene.trainer.step()
        await settle()
        return scene

    scene = loop.run_until_complete(play())
    for kind in ("score", "step", "put"):
        assert scene.value("exactly_once_duplicates_total", kind=kind) == 1, kind
    assert scene.value("staleness_max_versions", run="run-1") == 1
    assert scene.value("staleness_bound_versions", run="run-1") == 1
    assert scene.value("staleness_violations_samples", run="run-1") == 0
    assert scene.value("conservation_imbalance_samples", run="run-1") == 0
    assert scene.value("no_endless_wait_longest_seconds", run="run-1") > 0


def test_broken_books_and_a_broken_bound_show() -> None:
    registry = CollectorRegistry()
    metrics, state = InvariantMetrics(registry), open_state()
    make_ready(state, "a", "b")
    acknowledge(state, deliver(state), 1)
    state.run.trained_by_staleness[0] -= 1
    state.run.trained_by_staleness[3] += 1
    state.run.submitted += 5
    metrics.observe(state, audit(state), (), now_s=0.0)
    labels = {"run": "run-1"}
    assert registry.get_sample_value("penstock_invariant_conservation_imbalance_samples", labels) == 5
    assert registry.get_sample_value("penstock_invariant_staleness_violations_samples", labels) == 1
    assert registry.get_sample_value("penstock_invariant_staleness_max_versions", labels) == 3
