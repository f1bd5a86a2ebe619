"""Keeps the log-prob gaps of trained tokens in logprob_gaps.jsonl of the run folder: a line a group, oldest step first.

    {"policy_version": 12, "history": 0, "group_id": "t88", "gaps": {"0": BASE64, "3": BASE64}}

A gap is the trainer's log-prob of a token, in the pass that its loss was computed in, less the engine's when it was
sampled: what `loss/mismatch_kl` is the mean of. BASE64 is little-endian float16[L], nats, of the sample's L tokens that
are trained on. Samples whose advantages were all zero have none: they do not go through the model.

Promises: the file stays below its size (`penstock.process.thinned_file`), and a step of another history never stands
beside its successor's of the same version. It is written in a thread of its own: training never waits for it, and a
step that comes before the last one is written is left out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog

from penstock.process.durable_files import replace_file
from penstock.process.thinned_file import FULL_TO, thin
from services.trainer.data.prompt_order import training_position
from services.trainer.step.passes import Gaps

NAME = "logprob_gaps.jsonl"
MAX_STEP_SHARE = 1 / 16
"""Part of the size that a step may take; its further groups are left out."""
MAX_LINE_BYTES = 64 * 1024 * 1024

_log = structlog.get_logger()


class GapFile:
    """One run's file.

    Args:
        run_dir: The run's folder.
        groups_per_step: Groups of each step that are kept, the same ones as in an export of that many; None for all.
        max_bytes: Size of the file; a single large group may exceed it.
    """

    def __init__(self, run_dir: Path, *, groups_per_step: int | None, max_bytes: int) -> None:
        self._path = run_dir / NAME
        self._groups_per_step = groups_per_step
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gaps")
        self._writing: Future[None] | None = None

    def add(self, gaps: Gaps, group_ids: Sequence[str], *, policy_version: int, history: int) -> None:
        """Keep the gaps of some of a step's groups."""
        kept = evenly(group_ids, self._groups_per_step)
        if not gaps or not kept or (self._writing is not None and not self._writing.done()):
            return
        of_groups: dict[str, dict[str, str]] = {group_id: {} for group_id in kept}
        for (group_id, index), of_sample in gaps.items():
            if group_id in of_groups:
                encoded = base64.b64encode(of_sample.astype("<f2").tobytes()).decode()
                of_groups[group_id][str(index)] = encoded
        place = {"policy_version": policy_version, "history": history}
        lines = [
            json.dumps(place | {"group_id": group_id, "gaps": found}) + "\n"
            for group_id, found in of_groups.items()
            if found
        ]
        self._writing = self._thread.submit(self._write, lines)

    def cut_after(self, policy_version: int) -> None:
        """Remove the steps after `policy_version`, and what a crash tore. Raises OSError."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if (step := _step_of(line)) is not None and step[0] <= policy_version]
        if len(kept) < len(lines):
            replace_file(self._path, "".join(kept))

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown(wait=True)

    def _write(self, lines: Sequence[str]) -> None:
        most = self._max_bytes * MAX_STEP_SHARE
        written = 0
        try:
            with self._path.open("a", encoding="utf-8") as file:
                for line in lines:
                    if written and written + len(line) > most:
                        break
                    written += file.write(line)
            if self._path.stat().st_size > self._max_bytes:
                thin(
                    self._path,
                    to_bytes=int(FULL_TO * self._max_bytes),
                    step_of=_step_of,
                    max_line_bytes=MAX_LINE_BYTES,
                )
        except OSError as error:
            _log.warning("log-prob gaps were not kept", path=str(self._path), error=str(error))


def evenly(group_ids: Sequence[str], most: int | None) -> list[str]:
    """Of a step's groups in the order of their submission, as many at even distances; all for None.

    It is the broker's choice for an export of that many groups a step (`services/broker/streams/export_stream.py`), as
    far as groups are the trainer's own: names of others do not tell their order.
    """
    try:
        ordered = sorted(group_ids, key=training_position)
    except ValueError:
        ordered = list(group_ids)
    num = len(ordered)
    return ordered if most is None or num <= most else [ordered[index * num // most] for index in range(most)]


def _step_of(line: str | bytes) -> tuple[int, Hashable] | None:
    try:
        row = json.loads(line)
        return int(row["policy_version"]), row["history"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
