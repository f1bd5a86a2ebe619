"""Make the quick start's task for `penstock quickstart`: `python -m quickstart DIRECTORY SEED ANSWER.json`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from quickstart.prepare import prepare


def main(directory: str, seed: str, answer: str) -> None:
    """Make the task, and write the paths of its files into `answer`."""
    prepared = prepare(Path(directory), seed=int(seed), on_progress=lambda text: print(text, flush=True))
    Path(answer).write_text(json.dumps(asdict(prepared), default=str), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
