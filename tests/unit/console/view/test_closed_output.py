"""A run whose output nobody reads on goes on."""

from __future__ import annotations

import os

from console.view.live_display import PlainDisplay
from console.view.run_view import RunView


def test_a_display_outlives_its_reader() -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as out:
        display = PlainDisplay(RunView(run_id="r", num_steps=1), out)
        display.start()
        os.close(reader)
        display.note("nobody hears this")
        display.note("nor this")
        assert os.fstat(out.fileno()).st_rdev == os.stat(os.devnull).st_rdev, "what follows goes nowhere"
        display.stop()
