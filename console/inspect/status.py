"""Implements `penstock status`: one screen with a run's state, and the cause of every stall."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from console.advice.of_run import live_advice
from console.advice.rules import Advice
from console.config.run_folder import ProcessRecord
from console.inspect.certificates import certificate_lines
from console.inspect.exposure import exposure_lines
from console.inspect.find_run import Target, ask, find_run, get_trainer
from console.launch.metrics_targets import run_targets
from console.launch.supervisor import ProcessState
from console.view.forecast_quality import Document, fetch_lengths, length_lines
from console.view.formats import duration, plain_console, plain_table
from console.view.outcome import read_lines
from console.view.run_view import BUSY_WINDOW_S, idle_ratio
from penstock import flush_interval, heartbeat_interval
from penstock.clients.broker import BrokerClient
from penstock.config import ConfigError
from penstock.errors import BadTokenError, ForbiddenError, PenstockError, UnknownRunError
from penstock.security import Security
from penstock.security.checks.inspection import printable
from penstock.v1 import broker_pb2, trainer_pb2
from penstock.wire.timestamps import unix_s

WATCH_EVERY_S = 1.0
EXIT_OK, EXIT_AWAY = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A snapshot of a run, as far as it is known."""

    target: Target
    now_s: float
    """Unix seconds by the run's clock, like its times; by this machine's clock if no broker answers."""
    run: broker_pb2.GetRunResponse | None
    """None while the broker does not answer."""
    problem: str
    """Why the broker does not answer; empty if it does."""
    problem_for_s: float
    """How long the broker has not answered."""
    processes: Sequence[ProcessRecord]
    """Processes of the run on this machine that are not up."""
    trainer: trainer_pb2.GetTrainerResponse | None = None
    """The trainer's report; None if no trainer is known, or it does not answer."""
    trainer_problem: str = ""
    """Why the trainer does not answer; empty if it does, or none is known."""
    lengths: Document | None = None
    """Quality of the length forecasts; None if no scheduler reports it."""
    certificates: Sequence[str] = ()
    """Present and imminent problems of certificates."""
    exposure: Sequence[str] = ()
    """Services that other machines can reach in plain text."""
    advice: Sequence[Advice] = ()
    """What limits the run and would help; empty without the run's folder."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Where the run's processes on this machine serve their metrics, host:port by name."""


def status_command(run: str | None, *, broker: str | None, runs_dir: Path, is_watched: bool, as_json: bool) -> int:
    """Print a run's status, once or until interrupted; returns 1 if its broker does not answer. Raises ConfigError."""
    target = find_run(run, broker=broker, runs_dir=runs_dir)
    if target.broker is None:
        raise ConfigError(f"{target.run_id}: not under way here; name its broker with --broker, or see its report")
    shown = pictures(target)
    picture = next(shown)
    if not is_watched:
        _print(picture, as_json=as_json)
        return EXIT_OK if picture.run is not None else EXIT_AWAY
    if as_json or not sys.stdout.isatty():
        while True:
            _print(picture, as_json=as_json)
            picture = next(shown)
    with Live(render(picture), auto_refresh=False) as live:
        while True:
            live.update(render(next(shown)), refresh=True)


def pictures(target: Target) -> Iterator[Picture]:
    """A snapshot now, and then one every WATCH_EVERY_S."""
    since_s: float | None = None
    while True:
        run, problem = None, ""
        assert target.broker is not None
        try:
            run = asyncio.run(ask(target.broker, lambda client: _get_run(client, target.run_id)))
        except (UnknownRunError, BadTokenError, ForbiddenError) as error:
            raise ConfigError(str(error)) from error
        except PenstockError as error:
            problem = str(error)
        trainer, trainer_problem = _ask_trainer(target)
        asked_s = time.monotonic()
        since_s = None if run is not None else since_s or asked_s
        yield Picture(
            target=target,
            now_s=time.time() if run is None else unix_s(run.now_time),
            run=run,
            problem=problem,
            problem_for_s=asked_s - (since_s or asked_s),
            processes=_processes_down(target),
            metrics=_metrics(target),
            trainer=trainer,
            trainer_problem=trainer_problem,
            lengths=asyncio.run(fetch_lengths(target.run_id, target.scheduler, Security.from_environment())),
            certificates=asyncio.run(certificate_lines(target, Security.from_environment())),
            exposure=asyncio.run(exposure_lines(target, run, Security.from_environment())),
            advice=_advice(target, run),
        )
        time.sleep(WATCH_EVERY_S)


async def _get_run(client: BrokerClient, run_id: str) -> broker_pb2.GetRunResponse:
    """The run with its generators' last busy spans, which are asked for by the run's clock."""
    run = await client.get_run(run_id)
    return await client.get_run(run_id, busy_since_s=unix_s(run.now_time) - BUSY_WINDOW_S)


def _ask_trainer(target: Target) -> tuple[trainer_pb2.GetTrainerResponse | None, str]:
    """The trainer's report, or why there is none. While the broker is away, the trainer knows since when."""
    if target.trainer is None:
        return None, ""
    try:
        return asyncio.run(get_trainer(target.trainer)), ""
    except PenstockError as error:
        return None, str(error)


def _processes_down(target: Target) -> list[ProcessRecord]:
    records = target.folder.records() if target.folder is not None else []
    return [record for record in records if record.state != ProcessState.READY or not record.is_alive]


def _metrics(target: Target) -> dict[str, str]:
    records = target.folder.records() if target.folder is not None else []
    return {record.name: record.metrics for record in records if record.metrics and record.is_alive}


def _advice(target: Target, run: broker_pb2.GetRunResponse | None) -> list[Advice]:
    if target.folder is None or run is None or run.is_closed:
        return []
    try:
        return live_advice(read_lines(target.folder.metrics), run, idle_ratio=idle_ratio(run))
    except OSError:
        # A status without advice is still a status.
        return []


def _print(picture: Picture, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(as_document(picture)), flush=True)
    else:
        plain_console().print(render(picture), soft_wrap=True)


def render(picture: Picture) -> RenderableType:
    """The snapshot as readable text: progress, processes and stalls."""
    parts: list[RenderableType] = []
    if picture.run is None:
        asked = f"asked for {duration(picture.problem_for_s)}; " if picture.problem_for_s else ""
        parts.append(Text(f"{picture.problem} ({asked}the run continues when its broker answers)"))
    else:
        parts += [Text(line) for line in _summary(picture.run)]
        if present := _present(picture.run):
            parts.append(_generators_table(present, now_s=picture.now_s))
        parts += [Text(line) for line in length_lines(picture.lengths)] if picture.lengths is not None else []
        parts += [Text(_wait_line(wait, now_s=picture.now_s)) for wait in picture.run.waits]
    parts += [Text(line) for line in (*_trainer_lines(picture), *picture.certificates, *picture.exposure)]
    parts += [Text(_process_line(record)) for record in picture.processes]
    parts += [Text(line) for line in _metrics_lines(picture)]
    parts += [Text(f"advice: {one.text}") for one in picture.advice]
    return Group(*parts)


def _trainer_lines(picture: Picture) -> Iterator[str]:
    trainer = picture.trainer
    if picture.trainer_problem:
        yield picture.trainer_problem
    elif trainer is not None and trainer.run_id in ("", picture.target.run_id):
        message = f": {trainer.message}" if trainer.message else ""
        yield f"trainer {picture.target.trainer} ({_state(trainer)}){message}"
        yield from (f"warning of the trainer: {text}" for text in trainer.warnings)


def _state(trainer: trainer_pb2.GetTrainerResponse) -> str:
    return trainer_pb2.TrainerState.Name(trainer.state).removeprefix("TRAINER_STATE_").lower()


def _process_line(record: ProcessRecord) -> str:
    state = record.state if record.is_alive else "gone"
    is_dated = record.since_s and (record.is_alive or record.state != ProcessState.READY)
    since = f" since {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(record.since_s))}" if is_dated else ""
    why = f": {record.why}" if record.why else ""
    return f"process {record.name} is {state}{since}, restarted {record.num_restarts} times{why}"


def _metrics_lines(picture: Picture) -> Iterator[str]:
    if picture.metrics and picture.target.folder is not None:
        served = ", ".join(f"{name} {address}" for name, address in picture.metrics.items())
        yield f"metrics for Prometheus ({run_targets(picture.target.folder)}): {served}"


def _summary(run: broker_pb2.GetRunResponse) -> Iterator[str]:
    audit, by_state = run.audit, run.audit.in_flight_by_state
    in_flight = "  ".join(f"{name} {by_state[name]}" for name in sorted(by_state)) or "none in flight"
    yield f"run {run.run_id} ({'closed' if run.is_closed else 'open'}), policy version {run.policy_version}"
    yield f"samples: {in_flight}"
    yield (
        f"trained {audit.trained}, dropped {sum(audit.dropped.values())}, staleness at most {audit.max_staleness_seen}"
        f"{'' if audit.balanced else '; THE BOOKS DO NOT BALANCE, see penstock audit'}"
    )
    if run.dispatch_state:
        yield f"dispatch: {run.dispatch_state}"
    if run.HasField("flush_interval"):
        seconds = flush_interval.asked_s(run.flush_interval)
        yield f"the broker is busy: generators send tokens every {seconds:.1f} s, in larger chunks"
    if run.HasField("heartbeat_interval"):
        seconds = heartbeat_interval.asked_s(run.heartbeat_interval)
        yield f"the broker is busy: generators send heartbeats every {seconds:.1f} s, and report free slots later"
    yield f"reward workers: {', '.join(run.reward_worker_ids) or 'none connected'}"
    if run.policy.needs_reference_logprobs:
        yield f"scorers: {', '.join(run.scorer_ids) or 'none connected'}"
    yield from (f"warning of {worker_id}: {text}" for worker_id, text in sorted(run.reward_warnings.items()))
    for view in _present(run):
        if view.beat.warning:
            text = printable(view.beat.warning, max_chars=len(view.beat.warning))
            yield f"warning of {view.hello.generator_id}: {text}"
    if not _present(run):
        yield "generators: none connected"


def _present(run: broker_pb2.GetRunResponse) -> list[broker_pb2.GeneratorView]:
    """The generators without those that drained and are gone, of which busy spans are still told."""
    return [view for view in run.generators if not view.has_left]


def _generators_table(generators: Sequence[broker_pb2.GeneratorView], *, now_s: float) -> Table:
    numbers = ("version", "running", "waiting", "leases", "tokens/s", "cache")
    rows = (
        (
            view.hello.generator_id + (" (drains)" if view.beat.is_draining else ""),
            view.hello.engine,
            view.hello.site or "-",
            view.beat.policy_version,
            view.beat.num_running,
            view.beat.num_waiting,
            view.num_leases,
            f"{view.beat.tokens_per_second:.0f}",
            f"{100 * view.beat.kv_cache_usage:.0f} %",
            f"{max(0.0, now_s - unix_s(view.beat_time)):.0f} s ago",
        )
        for view in generators
    )
    return plain_table(("generator", "engine", "site", *numbers, "last beat"), rows)


def _wait_line(wait: broker_pb2.Wait, *, now_s: float) -> str:
    since = f" for {duration(max(0.0, now_s - unix_s(wait.since_time)))}" if wait.HasField("since_time") else ""
    return f"{wait.waiter} waits for {wait.owner}{since}: {wait.reason}"


def as_document(picture: Picture) -> dict[str, Any]:
    """The snapshot as JSON; times are Unix seconds."""
    document: dict[str, Any] = {
        "run_id": picture.target.run_id,
        "time_s": picture.now_s,
        "broker": picture.target.broker,
        "broker_problem": picture.problem or None,
        "trainer": _trainer_document(picture),
        "lengths": picture.lengths,
        "certificates": list(picture.certificates),
        "exposure": list(picture.exposure),
        "metrics": dict(picture.metrics),
        "advice": [{"text": one.text, "numbers": dict(one.numbers)} for one in picture.advice],
        "processes_down": [
            {"name": record.name, "state": record.state, "why": record.why, "since_s": record.since_s or None}
            for record in picture.processes
        ],
    }
    run = picture.run
    if run is None:
        return document
    return document | {
        "policy_version": run.policy_version,
        "is_closed": run.is_closed,
        "submitted": run.audit.submitted,
        "trained": run.audit.trained,
        "dropped": dict(run.audit.dropped),
        "in_flight_by_state": dict(run.audit.in_flight_by_state),
        "balanced": run.audit.balanced,
        "max_staleness_seen": run.audit.max_staleness_seen,
        "dispatch": run.dispatch_state,
        "flush_interval_s": flush_interval.asked_s(run.flush_interval) or None,
        "heartbeat_interval_s": heartbeat_interval.asked_s(run.heartbeat_interval) or None,
        "reward_worker_ids": list(run.reward_worker_ids),
        "scorer_ids": list(run.scorer_ids),
        "reward_warnings": dict(run.reward_warnings),
        "generators": [_generator_document(view) for view in _present(run)],
        "waits": [
            {
                "waiter": wait.waiter,
                "owner": wait.owner,
                "reason": wait.reason,
                "since_s": unix_s(wait.since_time),
                "deadline_s": unix_s(wait.deadline_time) if wait.HasField("deadline_time") else None,
            }
            for wait in run.waits
        ],
    }


def _trainer_document(picture: Picture) -> dict[str, Any] | None:
    trainer = picture.trainer
    if picture.target.trainer is None:
        return None
    return {
        "address": picture.target.trainer,
        "problem": picture.trainer_problem or None,
        "run_id": trainer.run_id if trainer is not None else None,
        "state": _state(trainer) if trainer is not None else None,
        "message": trainer.message if trainer is not None else None,
        "warnings": list(trainer.warnings) if trainer is not None else [],
    }


def _generator_document(view: broker_pb2.GeneratorView) -> dict[str, Any]:
    return {
        "generator_id": view.hello.generator_id,
        "engine": view.hello.engine,
        "site": view.hello.site,
        "policy_version": view.beat.policy_version,
        "num_running": view.beat.num_running,
        "num_waiting": view.beat.num_waiting,
        "num_leases": view.num_leases,
        "tokens_per_second": view.beat.tokens_per_second,
        "kv_cache_usage": view.beat.kv_cache_usage,
        "is_draining": view.beat.is_draining,
        "warning": view.beat.warning or None,
        "beat_s": unix_s(view.beat_time),
    }
