"""Shows a run under way: a live table on a terminal, otherwise one plain line per step.

Both also show what starts, what was restarted and what the run waits for, so that the output is never silent for long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from console.view.closed_output import discard
from console.view.formats import duration, number
from console.view.run_view import (
    LENGTH,
    MAX_STALENESS,
    REWARD,
    SAMPLES_PER_SECOND,
    STALENESS,
    TOKENS_PER_SECOND,
    RunView,
    Step,
)
from console.view.source_table import source_words
from penstock.v1 import trainer_pb2

QUIET_LINE_EVERY_S = 15.0
_REFRESHES_PER_SECOND = 2.0
_QUEUE_STATES = ("queued", "leased", "finished", "scoring", "scored", "delivered")
_MAX_WAITS = 3
_BAR_WIDTH = 60


class PlainDisplay:
    """One line for each step and each event; after a silence, a line about what the run waits for."""

    def __init__(self, view: RunView, out: TextIO, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._out = out
        self._now_s = now_s
        self._spoke_s = now_s()

    def start(self) -> None:
        """Start the display."""
        self._say(f"run {self._view.run_id}")

    def note(self, text: str) -> None:
        """Show an event, in one line."""
        self._say(text)

    def step(self, step: Step) -> None:
        """Show a finished step, which the view has already."""
        self._say(step_line(self._view, step))

    def tick(self) -> None:
        """After a silence, print what the run waits for. Called about once a second."""
        if self._now_s() - self._spoke_s >= QUIET_LINE_EVERY_S:
            self._say(f"... {self._view.phase}{_waits_text(self._view)}")

    def stop(self) -> None:
        """End the display; its output stays. Idempotent."""
        self._out.flush()

    def _say(self, text: str) -> None:
        self._spoke_s = self._now_s()
        try:
            print(text, file=self._out, flush=True)
        except OSError:
            # A run does not end because its output is closed, or because the output file's disk is full.
            discard(self._out)


class TableDisplay:
    """A table that is redrawn in place; events scroll by above it."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._console = console
        self._live = Live(
            get_renderable=lambda: render(view), console=console, refresh_per_second=_REFRESHES_PER_SECOND
        )

    def start(self) -> None:
        """Start the display."""
        self._live.start()

    def note(self, text: str) -> None:
        """Show an event."""
        self._console.print(Text(text), highlight=False)

    def step(self, step: Step) -> None:
        """Do nothing: the table shows it with its next refresh."""

    def tick(self) -> None:
        """Do nothing: the table refreshes by itself."""

    def stop(self) -> None:
        """End the display; its output stays. Idempotent."""
        self._live.stop()


Display = PlainDisplay | TableDisplay


def choose_display(view: RunView, *, out: TextIO = sys.stdout) -> Display:
    """A live table when `out` is a terminal that can move its cursor, plain lines otherwise."""
    console = Console(file=out)
    return (
        TableDisplay(view, console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay(view, out)
    )


def step_line(view: RunView, step: Step) -> str:
    """A step in one line."""
    parts = [f"step {step.version}/{view.num_steps}", f"reward {number(step.get(REWARD), '.3f')}"]
    if sources := source_words(step.metrics):
        parts[-1] += f" ({sources})"
    if view.evaluations:
        parts.append(f"accuracy {_sampled(view.evaluations[-1:])}")
    parts += [
        f"staleness {number(step.get(STALENESS), '.2f')} (max {number(step.get(MAX_STALENESS), '.0f')})",
        f"length {number(step.get(LENGTH), '.0f')}",
        f"{number(step.get(SAMPLES_PER_SECOND), '.0f')} samples/s",
        f"{number(step.get(TOKENS_PER_SECOND), '.0f')} tokens/s",
        f"idle: generators {_percent(view.generator_idle_ratio)}, trainer {_percent(step.idle_ratio)}",
        f"left {duration(view.eta_s)}",
    ]
    if view.num_restarts:
        parts.append(f"restarts {view.num_restarts}")
    return "  ".join(parts)


def render(view: RunView) -> RenderableType:
    """The live table."""
    step = view.step
    version = step.version if step is not None else 0
    head = Text(f"run {view.run_id}  {view.phase}", overflow="ellipsis", no_wrap=True)
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    get = (step.metrics if step is not None else {}).get
    queues = view.num_in_flight_by_state
    rows = (
        ("step", f"{version} / {view.num_steps}", "left", duration(view.eta_s)),
        (
            "reward",
            number(get(REWARD), ".3f"),
            "accuracy (held out)",
            f"{_sampled(view.evaluations[-1:])} (start {_sampled(view.evaluations[:1])})",
        ),
        (
            "staleness",
            f"mean {number(get(STALENESS), '.2f')}  max {number(get(MAX_STALENESS), '.0f')}",
            "length",
            f"{number(get(LENGTH), '.0f')} tokens",
        ),
        ("samples/s", number(get(SAMPLES_PER_SECOND), ".0f"), "tokens/s", number(get(TOKENS_PER_SECOND), ".0f")),
        (
            "idle",
            f"generators {_percent(view.generator_idle_ratio)}  trainer {_percent(step.idle_ratio if step else None)}",
            "restarts",
            _restarts_text(view),
        ),
    )
    sources = source_words(step.metrics if step is not None else {})
    for row in (*rows, *([("by source", sources, "", "")] if sources else ())):
        table.add_row(*(Text(cell, style="dim" if index % 2 == 0 else "") for index, cell in enumerate(row)))
    samples = "  ".join(f"{state} {queues.get(state, 0)}" for state in _QUEUE_STATES)
    bar = Table.grid()
    bar.add_row(ProgressBar(total=max(1, view.num_steps), completed=version, width=_BAR_WIDTH))
    lines: list[RenderableType] = [head, bar, table]
    lines.append(
        Text(f"samples: {samples}" if view.run is not None else "samples: the broker does not answer", no_wrap=True)
    )
    lines += [Text(text, style="dim", no_wrap=True, overflow="ellipsis") for text in wait_lines(view)]
    return Group(*lines)


def wait_lines(view: RunView) -> list[str]:
    """The first few stalls."""
    waits = view.run.waits if view.run is not None else ()
    return [f"{wait.waiter} waits for {wait.owner}: {wait.reason}" for wait in list(waits)[:_MAX_WAITS]]


def _sampled(reports: Sequence[trainer_pb2.EvaluationReport]) -> str:
    """The accuracy of one evaluation, or of none."""
    return "".join(f"{one.sampled_accuracy:.3f}" for one in reports if one.HasField("sampled_accuracy")) or "-"


def _restarts_text(view: RunView) -> str:
    restarted = [
        f"{record.name} ({record.num_restarts}{', paused' if record.state == 'paused' else ''})"
        for record in view.processes.values()
        if record.num_restarts
    ]
    return ", ".join(restarted) or "none"


def _waits_text(view: RunView) -> str:
    lines = wait_lines(view)
    return f"; {lines[0]}" if lines else ""


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"
