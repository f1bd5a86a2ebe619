"""Implements `penstock export`: writes a run's trained trajectories from its broker, or its folder, into a file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from console.config.config import load_run_config
from console.inspect.find_run import Target, find_run
from console.recording.step_recorder import Recording, missing_line, record, resume_point
from console.recording.writer import open_writer
from console.trajectories.kept_recording import copy_recording, is_whole, kept_recording
from penstock.clients.export import StepExport
from penstock.config import ConfigError
from penstock.errors import PenstockError
from penstock.network.connection import Connection
from penstock.security import Security

PATIENCE_S = 30.0
"""How long an export waits for a broker that is away; with --follow it waits indefinitely, as the run does."""


def export_command(
    run: str | None,
    *,
    out: Path,
    follow: bool,
    from_version: int,
    broker: str | None,
    runs_dir: Path,
    max_bytes: int | None = None,
) -> int:
    """Write a recording; returns the exit status. Raises ConfigError."""
    target = find_run(run, broker=broker, runs_dir=runs_dir)
    if max_bytes is not None and not follow:
        raise ConfigError("--max-bytes: only a followed recording is split; add --follow, or leave it out")
    if target.broker is None:
        return _export_kept(target, out, follow=follow, from_version=from_version)
    recording = Recording()
    try:
        asyncio.run(
            _export(target, out, follow=follow, from_version=from_version, recording=recording, max_bytes=max_bytes)
        )
    except PenstockError as error:
        raise ConfigError(str(error)) from error
    finally:
        # Also after Ctrl-C: steps already recorded with --follow are kept.
        if recording.num_samples:
            steps = f"steps {recording.first_version} to {recording.last_version}"
            print(f"{out}: {recording.num_samples} samples, {steps} of {target.run_id}")
    for version, num_samples in recording.missing.items():
        print(f"{out}: {missing_line(version, num_samples)}", file=sys.stderr)
    if not recording.num_samples:
        raise ConfigError(f"{target.run_id}: the broker retains no trained step that was asked for")
    return 0


def _export_kept(target: Target, out: Path, *, follow: bool, from_version: int) -> int:
    """Writes what the folder of a run without a broker holds. Raises ConfigError."""
    if target.folder is None or follow:
        raise ConfigError(f"{target.run_id}: not under way here; name its broker with --broker, or leave --follow out")
    source = kept_recording(target.folder, load_run_config(target.folder.config))
    recording = copy_recording(source, out, run_id=target.run_id, from_version=from_version)
    if not recording.num_samples:
        raise ConfigError(f"--from-version {from_version}: {source} holds no such step of {target.run_id}")
    steps = f"steps {recording.first_version} to {recording.last_version}"
    print(f"{out}: {recording.num_samples} samples, {steps} of {target.run_id}, from {source}")
    if not is_whole(source):
        print("note: a few groups of each step are all that is kept without record=true", file=sys.stderr)
    return 0


async def _export(
    target: Target, out: Path, *, follow: bool, from_version: int, recording: Recording, max_bytes: int | None
) -> None:
    assert target.broker is not None
    version, history = resume_point(out, target.run_id) if follow else (0, None)
    async with Connection(target.broker, security=Security.from_environment()) as broker:
        export = StepExport(
            broker,
            run_id=target.run_id,
            follow=follow,
            next_version=version or from_version,
            history=history,
            patience_s=None if follow else PATIENCE_S,
        )
        export.outage.on_notice = _show_outage
        writer = open_writer(out, is_followed=follow, max_bytes=max_bytes)
        is_kept = follow
        try:
            await record(export, writer, run_id=target.run_id, recording=recording, on_step=_progress)
            is_kept = is_kept or recording.num_samples > 0
        finally:
            (writer.close if is_kept else writer.discard)()


def _show_outage(outage: str) -> None:
    print(f"penstock: {outage or 'the broker is back'}", file=sys.stderr, flush=True)


def _progress(recording: Recording) -> None:
    if recording.last_version is not None and sys.stderr.isatty():
        print(f"\rstep {recording.last_version}, {recording.num_samples} samples", end="", file=sys.stderr, flush=True)
