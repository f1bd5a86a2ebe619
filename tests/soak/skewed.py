"""`penstock` with a wall clock that is wrong: `python -m tests.soak.skewed FILE ARGUMENTS...`.

FILE holds the seconds that this process's wall clock is off; it is read anew every second, so that the clock jumps
while the process works. Only Python's `time.time` and `time.time_ns` are wrong, which is all that Penstock reads.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

READ_EVERY_S = 1.0
_true_ns = time.time_ns


class WrongClock:
    """The clock that a file sets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_ns = 0
        self._due_s = 0.0

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch, plus the file's seconds."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + READ_EVERY_S
            self._offset_ns = int(float(self._path.read_text()) * 1e9)
        return _true_ns() + self._offset_ns

    def time(self) -> float:
        """The same in seconds."""
        return self.time_ns() * 1e-9


def set_offset(path: Path, offset_s: float) -> None:
    """Make the clock of the process that reads `path` wrong by so much."""
    beside = path.with_suffix(".new")
    beside.write_text(f"{offset_s}\n")
    beside.replace(path)


def main() -> None:
    """Run the command in this process."""
    clock = WrongClock(Path(sys.argv.pop(1)))
    time.time, time.time_ns = clock.time, clock.time_ns
    from console.cli import main as command

    command()


if __name__ == "__main__":
    main()
