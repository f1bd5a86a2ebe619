"""What a machine measures of its generators."""

import pytest

from console.node.rates import MIN_BUSY_S, MIN_SESSIONS, Meter, Replica
from penstock.v1 import generator_pb2

ONE, OTHER = Replica("h:1", 1), Replica("h:2", 1)


class Counters:
    """A generator that decodes so many samples at once, in steps of so long."""

    def __init__(self, generator_id, *, at_once, step_s):
        self._id, self._at_once, self._step_s = generator_id, at_once, step_s
        self._busy_s = self._swap_s = 0.0

    def after(self, seconds, *, swap_s=0.0):
        self._busy_s += seconds
        self._swap_s += swap_s
        return generator_pb2.GetGeneratorResponse(
            generator_id=self._id,
            num_running=self._at_once,
            busy_s=self._busy_s,
            total_swap_pause_s=self._swap_s,
            num_tokens_generated=round((self._busy_s - self._swap_s) / self._step_s * self._at_once),
        )


def watched(meter, *pairs, seconds=MIN_BUSY_S + 1, swap_s=0.0):
    meter.expect({replica.target: replica for replica, _ in pairs})
    for replica, counters in pairs:
        meter.see(replica, counters.after(0.0), now_s=0.0)
        for _ in range(round(seconds)):
            meter.see(replica, counters.after(1.0, swap_s=swap_s), now_s=0.0)
    return meter.rates()


def test_the_time_between_tokens_does_not_depend_on_how_much_there_is_to_do():
    for at_once in (2, 50):
        (rate,) = watched(Meter(), (ONE, Counters("a", at_once=at_once, step_s=0.02)))
        assert rate.token_s == pytest.approx(0.02, rel=0.01)
        assert rate.num_concurrent_samples == pytest.approx(at_once)
        assert rate.tokens_per_second == pytest.approx(at_once / 0.02, rel=0.01)


def test_nothing_is_said_before_enough_was_decoded_and_then_of_each_window_again():
    meter, counters = Meter(), Counters("a", at_once=10, step_s=0.02)
    assert watched(meter, (ONE, counters), seconds=MIN_BUSY_S / 2) == []
    assert watched(meter, (ONE, counters), seconds=MIN_BUSY_S / 2)[0].token_s == pytest.approx(0.02, rel=0.01)

    slowed = Counters("b", at_once=10, step_s=0.1)
    assert watched(meter, (ONE, slowed))[0].token_s == pytest.approx(0.1, rel=0.01)


def test_waits_for_an_environment_are_those_of_sessions_that_ended_lately():
    meter, counters = Meter(time_scale=2.0), Counters("a", at_once=10, step_s=0.02)
    (rate,) = watched(meter, (ONE, counters))
    assert not rate.HasField("environment_wait_s")
    for num_sessions, total_s in ((10, 1000.0), (10 + MIN_SESSIONS, 1000.0 + 3 * MIN_SESSIONS)):
        seen = counters.after(MIN_BUSY_S + 1)
        seen.num_environment_sessions, seen.total_environment_wait_s = num_sessions, total_s
        if num_sessions == 10:
            # What ended before is not lately.
            meter.expect({})
            meter.expect({ONE.target: ONE})
        meter.see(ONE, seen, now_s=0.0)
    (rate,) = meter.rates()
    assert rate.environment_wait_s == 6.0


def test_swaps_of_weights_do_not_make_a_machine_slow():
    (rate,) = watched(Meter(), (ONE, Counters("a", at_once=10, step_s=0.02)), seconds=2 * MIN_BUSY_S, swap_s=0.4)

    assert rate.token_s == pytest.approx(0.02, rel=0.01)


def test_replicas_of_one_degree_are_one_rate_and_others_another():
    alike = [(ONE, Counters("a", at_once=10, step_s=0.02)), (OTHER, Counters("b", at_once=20, step_s=0.02))]
    wide = (Replica("h:3", 4), Counters("c", at_once=10, step_s=0.01))
    rates = {rate.tensor_parallel: rate for rate in watched(Meter(), *alike, wide)}

    assert rates[1].num_concurrent_samples == pytest.approx(15)
    assert rates[1].tokens_per_second == pytest.approx(30 / 0.02, rel=0.01)
    assert rates[4].token_s == pytest.approx(0.01, rel=0.01)


def test_emulated_gpus_are_measured_in_emulated_seconds():
    (rate,) = watched(Meter(time_scale=20), (ONE, Counters("a", at_once=10, step_s=0.02)))

    assert rate.token_s == pytest.approx(0.4, rel=0.01)
    assert rate.tokens_per_second == pytest.approx(10 / 0.4, rel=0.01)


def test_what_was_measured_is_reported_until_generators_of_another_degree_run():
    meter = Meter()
    watched(meter, (ONE, Counters("a", at_once=10, step_s=0.02)))
    meter.expect({})
    assert [rate.tensor_parallel for rate in meter.rates()] == [1]

    wide = Replica("h:3", 4)
    meter.expect({wide.target: wide})
    assert meter.rates() == []


def test_a_start_takes_until_the_engine_is_built():
    meter = Meter(time_scale=3)
    meter.expect({ONE.target: ONE})
    meter.begin(ONE, 100.0)
    for state, now_s, told in (
        (generator_pb2.GENERATOR_STATE_STARTING, 104.0, None),
        (generator_pb2.GENERATOR_STATE_SERVING, 107.0, 21.0),
        (generator_pb2.GENERATOR_STATE_SERVING, 900.0, 21.0),
    ):
        meter.see(ONE, generator_pb2.GetGeneratorResponse(generator_id="a", state=state), now_s=now_s)
        assert meter.start_s == told
