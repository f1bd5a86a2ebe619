"""What the live view knows and how it says it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from console.config.run_folder import ProcessRecord
from console.view.formats import duration
from console.view.live_display import PlainDisplay, TableDisplay, choose_display, render, step_line
from console.view.run_view import RunView
from penstock.v1 import broker_pb2, trainer_pb2

METRICS = {
    "reward/mean": 0.5, "staleness/mean": 0.25, "staleness/max": 1.0, "length/mean": 45.0,
    "throughput/samples_per_second": 100.0, "throughput/response_tokens_per_second": 4500.0,
    "time/step_s": 2.0, "time/idle_s": 0.5,
}  # fmt: skip


def view_at(*versions: int) -> RunView:
    view = RunView(run_id="r1", num_steps=100)
    for version in versions:
        report = trainer_pb2.StepReport(policy_version=version, num_steps=100, metrics=METRICS)
        view.add_step(report, time_s=10.0 * version)
    return view


def test_a_step_line_names_everything_that_matters() -> None:
    view = view_at(9, 10)
    view.evaluations.append(trainer_pb2.EvaluationReport(policy_version=0, sampled_accuracy=0.3))
    view.processes["broker"] = record("broker", num_restarts=2)
    assert view.step is not None
    line = step_line(view, view.step)
    for words in ("step 10/100", "reward 0.500", "accuracy 0.300", "staleness 0.25 (max 1)", "100 samples/s",
                  "4500 tokens/s", "trainer 25 %", "left 15:00", "restarts 2"):  # fmt: skip
        assert words in line


def test_the_pace_of_the_latest_steps_gives_the_time_left() -> None:
    assert view_at(1).eta_s is None
    assert view_at(1, 2, 3).eta_s == pytest.approx(970.0)


def test_a_rewind_forgets_the_steps_that_were_undone() -> None:
    view = view_at(1, 2, 3, 4, 3)
    assert sorted(view.history) == [1, 2, 3]
    assert view.eta_s is None


def test_generators_idle_time_is_what_their_spans_leave_over() -> None:
    view = view_at()
    run = broker_pb2.GetRunResponse()
    generator = run.generators.add()
    generator.beat_time.FromSeconds(1000)
    span = generator.busy_spans.add()
    span.start_time.FromSeconds(900)
    span.end_time.FromSeconds(995)
    run.now_time.FromSeconds(1000)
    view.set_run(run)
    assert view.generator_idle_ratio == pytest.approx(1 / 3)
    view.set_run(None)
    assert view.generator_idle_ratio is None


def test_the_table_shows_queues_waits_and_restarts() -> None:
    view = view_at(10)
    view.processes["generator-0"] = record("generator-0", num_restarts=1)
    run = broker_pb2.GetRunResponse()
    run.audit.in_flight_by_state.update({"queued": 7})
    run.waits.add(waiter="trainer", owner="reward", reason="37 samples are not scored")
    view.set_run(run)
    out = io.StringIO()
    Console(file=out, width=160).print(render(view))
    for words in ("10 / 100", "queued 7", "trainer waits for reward: 37 samples", "generator-0 (1)"):
        assert words in out.getvalue()


def test_the_table_can_be_drawn_before_anything_is_known() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(render(RunView(run_id="r1", num_steps=5)))
    assert "0 / 5" in out.getvalue()


def test_text_of_the_run_is_not_read_as_markup() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    display = TableDisplay(view_at(1), console)
    display.note("[bold]x[/bold] [/nonsense]")
    assert "[bold]x[/bold] [/nonsense]" in out.getvalue()


def test_plain_lines_are_written_where_there_is_no_terminal() -> None:
    assert isinstance(choose_display(view_at(), out=io.StringIO()), PlainDisplay)


def test_silence_is_broken_by_what_is_waited_for() -> None:
    now_s = 0.0
    out = io.StringIO()
    view = view_at()
    view.phase = "evaluating"
    display = PlainDisplay(view, out, now_s=lambda: now_s)
    display.tick()
    assert out.getvalue() == ""
    now_s = 16.0
    display.tick()
    display.tick()
    assert out.getvalue() == "... evaluating\n"


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (5, "0:05"), (65.4, "1:05"), (3600, "1:00:00")])
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def record(name: str, *, num_restarts: int) -> ProcessRecord:
    return ProcessRecord(name=name, pid=1, started_ticks=0, address="", state="ready", num_restarts=num_restarts)
