"""The event log of a run: numbered, replayed, followed live, bounded."""

import asyncio

from penstock.clock import ManualClock
from penstock.v1 import trainer_pb2
from services.trainer.reporting import events as events_module
from services.trainer.reporting.events import RunEvents


def new_events():
    return RunEvents(run_id="r", num_steps=9, clock=ManualClock())


async def collect(events, **options):
    return [event async for event in events.follow(**options)]


async def test_a_reader_gets_what_was_and_then_what_comes_and_ends():
    events = new_events()
    events.change_state(trainer_pb2.TRAINER_STATE_TRAINING, "")
    reader = asyncio.create_task(collect(events))
    late = asyncio.create_task(collect(events, from_sequence=2))
    await asyncio.sleep(0)
    events.report_step(policy_version=1, metrics={"reward/mean": 0.5})
    await asyncio.sleep(0)
    events.finish(trainer_pb2.RUN_OUTCOME_COMPLETED, message="", summary_json="{}")
    seen = await asyncio.wait_for(reader, 5)
    assert [event.sequence for event in seen] == [1, 2, 3, 4]
    assert seen[1].step.metrics["reward/mean"] == 0.5
    assert seen[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED
    assert await asyncio.wait_for(late, 5) == seen[1:]
    assert await collect(events) == seen


async def test_what_is_waited_for_is_said_again_though_the_clock_was_set_back():
    clock = ManualClock()
    events = RunEvents(run_id="r", num_steps=9, clock=clock)
    events.say_waiting("scores")
    clock.set_wall(-3600.0)
    clock.advance(events_module.MOST_WAITING_GAP_S)
    events.say_waiting("scores still")
    events.finish(trainer_pb2.RUN_OUTCOME_STOPPED, message="", summary_json="")
    told = [event.state_changed.message for event in await collect(events) if event.HasField("state_changed")]
    assert told[:2] == ["scores", "scores still"]


async def test_a_state_said_twice_is_one_event_and_the_end_comes_once():
    events = new_events()
    for _ in range(2):
        events.change_state(trainer_pb2.TRAINER_STATE_EVALUATING, "version 0")
    for _ in range(2):
        events.finish(trainer_pb2.RUN_OUTCOME_FAILED, message="broken", summary_json="")
    kinds = [event.WhichOneof("event") for event in await collect(events)]
    assert kinds == ["state_changed", "state_changed", "finished"]
    assert events.state == trainer_pb2.TRAINER_STATE_FAILED


async def test_old_events_are_let_go_and_a_reader_starts_at_the_oldest_kept(monkeypatch):
    monkeypatch.setattr(events_module, "MAX_KEPT_EVENTS", 4)
    events = new_events()
    for version in range(1, 11):
        events.report_step(policy_version=version, metrics={})
    events.finish(trainer_pb2.RUN_OUTCOME_STOPPED, message="", summary_json="")
    seen = await collect(events, from_sequence=1)
    assert [event.sequence for event in seen] == [9, 10, 11, 12]
