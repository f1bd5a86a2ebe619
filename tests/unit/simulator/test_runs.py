"""Runs on a virtual clock: what they must add up to, whatever the plan, and what must be faster than what."""

import math
from dataclasses import replace

import pytest

from benchmarks.dispatch.emulated_fleet import EmulatedGenerator
from benchmarks.dispatch.queue_simulation import Scenario, simulate
from benchmarks.scheduler.problems.emulated_machines import PROBLEM as EMULATED
from benchmarks.scheduler.problems.settings import GRPO_TASKS, lognormal, machines, make_problem
from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import LatencyModel
from services.broker.fleet.snapshot import lengths_seen
from services.broker.rules.limits import Limits
from services.scheduler.cost_model.calibrated import CALIBRATED, make_model
from services.scheduler.cost_model.reference import CostModel, Limit
from services.scheduler.problem.problem import Problem
from simulator.virtual_run import simulation as simulate_module
from simulator.virtual_run.build_run import Mode, Setup, SetupError, TrainerSpec, colocated
from simulator.virtual_run.event_loop import Change, Options, Run
from simulator.virtual_run.ledger import Group, Ledger, Sample
from simulator.virtual_run.simulation import report_of, simulate_plan, simulate_setup, steady_rate
from simulator.virtual_run.virtual_generator import Engine, GeneratorSpec
from tests.helpers.plans.problems import plan, problem

pytestmark = pytest.mark.slow

SPLIT = plan([("h20-0", 1, 8), ("h20-1", 1, 8), ("h20-2", 1, 8)], [("h800-0", 8)])


def long_tailed(*, staleness: int = 3, group_size: int = 4, bw_Gbps: float | None = None):
    """24 H20 generate, 8 H800 train, in one region or in two; lengths with a long tail."""
    far = bw_Gbps is not None
    workload = {
        "prompts_per_step": 64,
        "group_size": group_size,
        "prompt_len": 200,
        "output_len": lognormal(1500, 1.0, 16_000),
        "staleness": staleness,
        "train_tasks": GRPO_TASKS,
    }
    h20 = {**machines("H20", 3), "region": "far" if far else "r0"}
    links = [{"a": "r0", "b": "far", "bw_Gbps": bw_Gbps, "latency_ms": 5}] if far else []
    return make_problem("tailed", [h20, machines("H800", 1)], "qwen2.5-7b", workload=workload, links=links)


def simulated(mode: Mode, *, seed: int = 1, given=None, num_steps: int = 8, **options):
    model = make_model(given or long_tailed(), CALIBRATED)
    return simulate_plan(model, SPLIT, Options(mode=mode, num_steps=num_steps, seed=seed, **options))


def test_a_generator_decodes_as_fast_as_its_steps_say():
    spec = GeneratorSpec(name="g", node="n", region="r", steps_s=(0.0, 0.010, 0.012), prefill_s=0.5, pause_s=0.0)
    engine = Engine(spec)
    engine.take(Sample(Group(1, [100.0]), 100.0))
    engine.take(Sample(Group(2, [300.0]), 300.0))

    assert engine.next_end_s == pytest.approx(2 * 0.5 + 100 * 0.012)
    engine.advance(engine.next_end_s)
    assert [sample.group.sequence for sample in engine.pop_ended()] == [1]
    assert engine.next_end_s == pytest.approx(2.2 + 200 * 0.010)


def test_a_lost_generator_returns_the_rest_of_its_samples():
    spec = GeneratorSpec(name="g", node="n", region="r", steps_s=(0.0, 0.01), prefill_s=0.0, pause_s=0.0)
    engine = Engine(spec)
    engine.take(Sample(Group(1, [100.0]), 100.0))
    engine.advance(0.4)

    (left,) = engine.lose_all()

    assert left.remaining_tokens == pytest.approx(60)
    assert engine.num_free == 0


def test_a_moved_sample_keeps_its_tokens_and_recomputes_its_context():
    steps_s = (0.0, 0.010, 0.020)
    spec = GeneratorSpec(name="g", node="n", region="r", steps_s=steps_s, prefill_s=0.0, pause_s=0.0)
    slow, quick = Engine(spec), Engine(replace(spec, steps_s=(0.0, 0.005), prefill_token_s=0.001))
    sample = Sample(Group(1, [100.0]), 100.0)
    slow.take(sample)
    for engine in (slow, quick):
        engine.advance(0.4)

    moved = slow.let_go(sample, 0.4)
    quick.take_over(moved, context_tokens=50.0, delay_s=0.3)

    assert (moved.num_done, moved.remaining_tokens) == pytest.approx((40.0, 60.0))
    assert slow.num_running == 0
    assert quick.next_end_s == pytest.approx(0.4 + 50 * 0.001 + 0.3 + 60 * 0.005)
    assert [(held.group.sequence, done) for held, done in quick.held()] == [(1, pytest.approx(40.0))]


def test_idle_generators_take_over_as_the_broker_lets_them():
    lengths = [100 * (1 + index * 7 % 40) for index in range(96)]
    speeds = (0.01, 0.01, 0.04, 0.04)
    models = [LatencyModel(base_s=base_s, per_sample_s=0.0001, max_samples=8) for base_s in speeds]
    fleet = [EmulatedGenerator(generator_id=f"g{index}", model=model) for index, model in enumerate(models)]
    scenario = Scenario(name="s", generators=fleet, lengths=[[each] for each in lengths], forecasts=[None] * 96)
    expected = simulate(scenario, "fifo")

    moving, staying = (one_step(models, lengths, can_move=can_move) for can_move in (True, False))

    assert expected.num_moves > 0
    assert moving.num_moves > 0
    assert moving.steps[0].end_s == pytest.approx(expected.makespan_s, rel=0.05)
    assert staying.num_moves == 0
    assert staying.steps[0].end_s > 1.2 * moving.steps[0].end_s


def test_the_longest_are_kept_from_slow_generators_as_the_broker_places_them():
    lengths = [100 * (1 + index * 7 % 40) for index in range(96)]
    models = [LatencyModel(base_s=base_s, per_sample_s=0.0001, max_samples=8) for base_s in (0.01, 0.01, 0.1, 0.1)]
    fleet = [EmulatedGenerator(generator_id=f"g{index}", model=model) for index, model in enumerate(models)]
    forecasts = [float(each) for each in lengths]
    scenario = Scenario(name="s", generators=fleet, lengths=[[each] for each in lengths], forecasts=forecasts)

    placed, served = (one_step(models, lengths, can_move=True, places=places) for places in (True, False))

    assert placed.steps[0].end_s == pytest.approx(simulate(scenario, "lpt").makespan_s, rel=0.01)
    assert served.steps[0].end_s > 1.03 * placed.steps[0].end_s


def one_step(models, lengths, *, can_move, places=None):
    """A synchronous step without training; forecasts are exact where `places` says whether they are followed."""
    specs = [
        GeneratorSpec(
            name=f"g{index}",
            node=f"g{index}",
            region="r",
            steps_s=(0.0, *(model.step_s(count) for count in range(1, model.max_samples + 1))),
            prefill_s=0.0,
            pause_s=0.0,
        )
        for index, model in enumerate(models)
    ]
    limits = Limits.from_proto(
        broker_pb2.RunLimits(groups_per_step=len(lengths), group_size=1, max_completion_tokens=1 << 20)
    )
    waiting = iter(lengths)
    forecast = None if places is None else (lambda lengths: lengths[0])
    ledger = Ledger(limits, lambda _version: [float(next(waiting))], forecast)
    trainer = TrainerSpec(sample_s=0.0, mean_tokens=1.0, prompt_tokens=128.0, end_s=0.0)
    setup = Setup(generators=tuple(specs), trainer=trainer, transfer_s={}, staleness=0)
    known = [(0.0 if forecast is None else float(length), [length]) for length in lengths]
    seen = lengths_seen(known) if can_move else None
    options = Options(mode=Mode.DISAGGREGATED_SYNC, num_steps=1, places=bool(places))
    return Run(setup, ledger, options, seen=seen).play()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("longest_first", [True, False])
def test_counters_balance_and_nothing_is_staler_than_allowed(mode, longest_first):
    run = simulated(mode, longest_first=longest_first)
    found = report_of(make_model(long_tailed(), CALIBRATED), run, predicted=None)

    assert found.audit["is_balanced"]
    assert found.audit["num_trained"] == 8 * 64
    assert max(found.staleness) <= run.setup.staleness == mode.staleness(3)
    assert sum(found.staleness.values()) == 8 * 256
    assert 0 <= found.generation_idle < 1
    assert 0 <= found.training_idle < 1


def test_each_way_to_overlap_is_faster_than_the_one_before():
    rates = [
        simulated(mode).samples_per_second
        for mode in (Mode.DISAGGREGATED_SYNC, Mode.STREAMING, Mode.ONE_STEP, Mode.ASYNC)
    ]

    assert rates == sorted(rates)
    assert rates[1] > 1.05 * rates[0]
    assert rates[3] > 1.3 * rates[1]


@pytest.mark.parametrize(
    ("candidate", "limit"),
    [
        (plan([("h20-0", 1, 8)], [("h800-0", 4)]), Limit.TRAINING),
        (plan([("h20-0", 1, 2)], [("h800-0", 8)]), Limit.GENERATION),
    ],
)
def test_where_all_lengths_are_alike_it_agrees_with_the_cost_model(candidate, limit):
    model = CostModel(problem("tiny_02", "workload.output_len={type: fixed, length: 1500}"))
    score = model.score(candidate)

    run = simulate_plan(model, candidate, Options(mode=Mode.ASYNC, num_steps=14, skip=6))

    assert score.limit is limit
    assert run.samples_per_second == pytest.approx(score.samples_per_second, rel=0.05)


def test_generators_may_end_their_samples_before_they_take_new_weights(monkeypatch):
    held: list[int] = []
    renew = Run._renew

    def noted(run, engine):
        held.append(engine.num_running)
        renew(run, engine)

    monkeypatch.setattr(Run, "_renew", noted)

    assert simulated(Mode.ONE_STEP, drains=True).ledger.audit()["is_balanced"]
    assert held
    assert not any(held)
    simulated(Mode.ONE_STEP)
    assert any(held)


def test_the_same_seed_gives_the_same_run():
    assert simulated(Mode.ASYNC).samples_per_second == simulated(Mode.ASYNC).samples_per_second
    assert simulated(Mode.ASYNC).samples_per_second != simulated(Mode.ASYNC, seed=2).samples_per_second


def test_weights_go_to_regions_in_the_order_of_their_generators_so_that_a_seed_gives_one_run_in_every_process():
    setup = colocated(make_model(long_tailed(bw_Gbps=100.0), CALIBRATED))

    assert list(setup.transfer_s) == ["far", "r0"]


def test_longer_completions_are_slower_and_no_tokens_are_made_up():
    growing, steady = simulated(Mode.ASYNC, growth_per_step=0.2), simulated(Mode.ASYNC)

    assert growing.samples_per_second < 0.9 * steady.samples_per_second
    assert growing.record.steps[-1].num_tokens > 1.5 * steady.record.steps[-1].num_tokens


def test_a_machine_that_dies_costs_time_and_no_sample():
    alone = simulated(Mode.ASYNC, num_steps=12)
    dies = simulated(Mode.ASYNC, num_steps=12, changes=[Change(100.0, "h20-1", "fail")])

    assert dies.ledger.num_returned > 0
    assert dies.ledger.audit()["is_balanced"]
    assert dies.ledger.num_trained == 12 * 64
    assert dies.samples_per_second < alone.samples_per_second


def test_a_machine_that_joins_is_used():
    late = simulated(Mode.ASYNC, num_steps=12, changes=[Change(400.0, "h20-1", "join")])
    never = simulated(Mode.ASYNC, num_steps=12, changes=[Change(1e8, "h20-1", "join")])

    assert late.samples_per_second > never.samples_per_second


def test_a_slow_machine_slows_the_run():
    slow = simulated(Mode.ASYNC, changes=[Change(0.0, "h20-0", "slow", factor=4.0)])

    assert slow.samples_per_second < simulated(Mode.ASYNC).samples_per_second


def test_weights_that_travel_for_longer_than_a_step_hold_generation_up():
    near, far = (simulated(Mode.ASYNC, given=long_tailed(bw_Gbps=bw)) for bw in (100.0, 1.0))

    assert far.samples_per_second < 0.8 * near.samples_per_second


def test_a_service_that_drains_ends_all_samples_before_any_generator_takes_new_weights(monkeypatch):
    held: list[int] = []

    class Watched(Run):
        def _renew(self, engine: Engine) -> None:
            held.append(self.num_held)
            super()._renew(engine)

    monkeypatch.setattr(simulate_module, "Run", Watched)
    goes_on = simulated(Mode.ONE_STEP, can_move=False)
    assert max(held) > 0
    held.clear()
    drains = simulated(Mode.ONE_STEP, can_move=False, drains=True)

    assert len(held) >= 7 * len(drains.setup.generators)
    assert set(held) == {0}
    assert drains.samples_per_second < 0.95 * goes_on.samples_per_second


def test_a_run_without_generators_ends_with_the_reason():
    changes = [Change(50.0, f"h20-{index}", "fail") for index in range(3)]

    with pytest.raises(RuntimeError, match="nothing goes on"):
        simulated(Mode.ASYNC, changes=changes, look_s=10.0)


def test_a_machine_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no generator runs on 'h999-0'; there are: h20-0"):
        simulated(Mode.ASYNC, changes=[Change(1.0, "h999-0", "fail")])


def test_blind_to_unlike_gpus_all_wait_for_the_slowest():
    model = make_model(long_tailed(), CALIBRATED)
    options = Options(mode=Mode.COLOCATED_SYNC)

    aware = simulate_setup(model, colocated(model), options)
    blind = simulate_setup(model, colocated(model, is_blind=True), options)

    assert blind.samples_per_second < 0.9 * aware.samples_per_second


def test_a_plan_that_cannot_run_says_why():
    with pytest.raises(SetupError, match="machine h20-0 has 8 GPUs, and the plan uses 9"):
        simulate_plan(CostModel(long_tailed()), plan([("h20-0", 1, 9)], [("h800-0", 8)]), Options(mode=Mode.ASYNC))


def test_a_sample_is_about_one_event_however_many_generators_there_are():
    limits = Limits.from_proto(
        broker_pb2.RunLimits(groups_per_step=2000, group_size=1, max_staleness=1, max_completion_tokens=4096)
    )
    given = make_model(long_tailed(group_size=1), CALIBRATED)
    setup = simulate_plan(given, SPLIT, Options(mode=Mode.ASYNC, num_steps=3)).setup
    many = replace(
        setup,
        generators=tuple(replace(setup.generators[0], name=f"g{index}") for index in range(300)),
        trainer=TrainerSpec(sample_s=0.001, mean_tokens=1000.0, prompt_tokens=100.0, end_s=0.0),
    )
    ledger = Ledger(limits, lambda version: [500.0 + version], None)

    record = Run(many, ledger, Options(mode=Mode.STREAMING, num_steps=10)).play()

    assert ledger.num_trained == 20_000
    assert record.num_events < 1.5 * ledger.num_begun


UNLIKE = plan([("l40s-0", 1, 2), ("l4-0", 1, 1), ("l4-1", 1, 1)], [("head-0", 2)])


def emulated(*, staleness: int) -> CostModel:
    """Two L40S and two L4 that generate for two A100."""
    return CostModel(Problem.model_validate({**EMULATED, "workload": {**EMULATED["workload"], "staleness": staleness}}))


def test_a_steady_rate_is_what_the_cost_model_expects_where_staleness_leaves_enough_work_and_far_below_where_not():
    def share(staleness: int) -> float:
        model = emulated(staleness=staleness)
        rate = steady_rate(model, UNLIKE, time_left=lambda: math.inf)
        assert rate is not None
        return rate / model.score(UNLIKE).samples_per_second

    assert share(12) == pytest.approx(1, abs=0.05)
    assert share(3) < 0.8


@pytest.mark.parametrize(("staleness", "places"), [(12, False), (1, True)])
def test_a_steady_rate_is_that_of_the_dispatch_that_suits_the_fleet(staleness, places):
    model = emulated(staleness=staleness)

    def rate(*, places: bool) -> float:
        options = Options(mode=Mode.ASYNC, num_steps=staleness + 51, skip=staleness + 3, places=places)
        return simulate_plan(model, UNLIKE, options).samples_per_second

    assert rate(places=places) > 1.2 * rate(places=not places)
    assert steady_rate(model, UNLIKE, time_left=lambda: math.inf) == rate(places=places)


def test_there_is_no_steady_rate_where_time_is_too_short():
    assert steady_rate(make_model(long_tailed(), CALIBRATED), SPLIT, time_left=lambda: 0.0) is None
