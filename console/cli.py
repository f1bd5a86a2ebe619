"""Defines the `penstock` command: names, options and help. Each command is implemented in its own module.

Imports nothing but typer until a command runs, so that `--help` answers at once. User errors are reported on stderr,
one line each, with exit status 2 and no traceback.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands import cli_bench, cli_certs, cli_environments, cli_planning, cli_recording, cli_runs
from console.subcommands.cli_common import (
    Broker,
    Json,
    NoticeFile,
    NoticeUrl,
    RunArgument,
    RunDir,
    RunsDir,
    command,
)

app = typer.Typer(
    name="penstock",
    help="Train language models by reinforcement learning with five services that meet over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
reward_app = typer.Typer(
    name="reward",
    help="Serve and check reward models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(reward_app)

_Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.SUBKEY=VALUE]...", help="Settings, as YAML.")]


@command(app)
def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG.yaml [KEY.SUBKEY=VALUE]...", help="Configuration, and settings that override it."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved config, and exit.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN_DIR", help="Continue the run in this folder.")
    ] = None,
    resume_or_start: Annotated[
        bool,
        typer.Option(
            "--resume-or-start",
            help="Continue the run with this run.id if it was started before, by its folder or the checkpoints in "
            "run.checkpoint_storage, otherwise start it; a completed run is left as it is. For containers and service "
            "managers, which restart the command.",
        ),
    ] = False,
) -> int:
    """Train: start what the config says is local, attach to the rest, follow the run to its end.

    Exit status: 0 completed, 1 failed, 2 user error, 130 interrupted (continue with --resume).

    Examples:
      penstock run examples/quickstart.yaml
      penstock run my.yaml run.num_steps=200 generator.engine=transformers
      penstock run my.yaml --dry-run
      penstock run --resume runs/run-20260101-120000
    """
    from console.run.run_commands import run_command

    return run_command(arguments or [], dry_run=dry_run, resume=resume, resume_or_start=resume_or_start)


@command(app)
def quickstart(
    overrides: _Overrides = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the task, the model and the run.")] = 0,
    directory: RunsDir = Path("runs"),
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Make model and data, then exit.")] = False,
) -> int:
    """Make a tiny model and an arithmetic task, and train it on this machine in minutes.

    Examples:
      penstock quickstart
      penstock quickstart --seed 1 run.num_steps=20
      penstock quickstart generator.engine=transformers
    """
    from console.run.run_commands import quickstart_command

    return quickstart_command(overrides or [], seed=seed, directory=directory, prepare_only=prepare_only)


@command(app)
def serve(  # noqa: PLR0913, PLR0917 - one argument for each option
    kind: Annotated[
        str,
        typer.Argument(
            metavar="SERVICE", help="broker, generator, reward, trainer, scheduler, scorer, critic or sandbox."
        ),
    ],
    overrides: _Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="The service's own configuration, YAML; defaults if omitted.")
    ] = None,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name in its log lines.")] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option("--log-format", help="text or json.")] = "text",
    notice_file: NoticeFile = None,
    notice_url: NoticeUrl = None,
) -> None:
    """Run one service in this process until SIGTERM or Ctrl-C.

    A trainer accepts run folders, models and data below allowed_roots only (default: the working directory).

    Examples:
      penstock serve broker redis_url=redis://redis:6379/0 --listen 0.0.0.0:7301
      penstock serve trainer --listen 0.0.0.0:7304 weights_listen=0.0.0.0:7305 weights_url=trainer:7305
      penstock serve generator --config generator.yaml generator_id=gen-3
      penstock serve reward run_id=my-run broker=broker:7301 tokenizer_path=models/mine reward.model=exact_match
      penstock serve scorer run_id=my-run broker=broker:7301 model_path=models/mine
      penstock serve critic run_id=my-run model_path=models/mine state_dir=runs/my-critic --listen 0.0.0.0:7309
      penstock serve sandbox programs.num_cells=8 --listen 0.0.0.0:7312
    """
    from console.serve.serve import serve_command
    from penstock.notices.watch import NoticeSources

    serve_command(
        kind,
        config,
        overrides or [],
        listen=listen,
        name=name,
        level=log_level,
        log_format=log_format,
        notices=NoticeSources(file=notice_file, url=notice_url),
    )


@command(reward_app, "serve")
def reward_serve(
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="Also searched in the current folder.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on.")
    ] = "127.0.0.1:7310",
) -> None:
    """Serve a Python function as a reward model; a run uses it as reward.model=grpc://HOST:PORT.

    Example:
      penstock reward serve my_rewards:exact --listen 0.0.0.0:7310
    """
    from console.serve.rewards import serve_reward

    serve_reward(target, listen=listen)


@command(reward_app, "check")
def reward_check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT",
            help="A running reward model, in any language; or a .yaml file with a section `reward`.",
        ),
    ],
) -> int:
    """Check that a reward model keeps the contract, or that the one configured works; exit status 1 if not.

    Examples:
      penstock reward check 127.0.0.1:7310
      penstock reward check my.yaml     # whether its judge answers, and its canaries are scored as known
    """
    from console.serve.rewards import check_reward

    return check_reward(target)


@command(reward_app, "resolve", hidden=True)
def reward_resolve(models: Annotated[list[str], typer.Argument(metavar="MODEL...")]) -> None:
    """Check that reward models' names can be loaded here; `penstock run` does so before it starts anything."""
    from console.serve.rewards import resolve_reward

    resolve_reward(models)


@command(app)
def status(
    run: RunArgument = None,
    broker: Broker = None,
    directory: RunsDir = Path("runs"),
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, one document per line.")] = False,
) -> int:
    """Show a run: its queues, its generators, and every stall with its cause and duration.

    Exit status 1 when the broker does not answer.

    Examples:
      penstock status
      penstock status runs/run-20260101-120000
      penstock status my-run --broker broker:7301 --watch
    """
    from console.inspect.status import status_command

    return status_command(run, broker=broker, runs_dir=directory, is_watched=watch, as_json=as_json)


@command(app)
def audit(
    run: RunArgument = None,
    broker: Broker = None,
    directory: RunsDir = Path("runs"),
    by_version: Annotated[
        bool, typer.Option("--by-version", help="Print a line for each version under which samples were submitted.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check submitted = trained + dropped + in flight, live or afterwards; exit status 1 when it does not hold.

    The table shows trained and dropped samples by completion length: if the share lost grows with the length, the run
    prefers short samples.

    Examples:
      penstock audit runs/run-20260101-120000
      penstock audit my-run --broker broker:7301 --by-version
    """
    from console.inspect.audit_report import audit_command

    return audit_command(run, broker=broker, runs_dir=directory, by_version=by_version, as_json=as_json)


@command(app)
def report(run_dir: RunDir) -> int:
    """Regenerate report.html of a run, also while the run is under way.

    Example:
      penstock report runs/run-20260101-120000
    """
    from console.run.run_commands import report_command

    return report_command(run_dir)


@command(app)
def view(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN_DIR...", help="Run folders; several are shown side by side.")
    ],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on; port 0 is a free one.")
    ] = "127.0.0.1:0",
    broker: Broker = None,
) -> int:
    """Show runs on a page in the browser: curves, samples, where time goes, what is wrong; until Ctrl-C.

    Works during a run, after it and after a crash, and changes nothing. With --broker a run's id will do where there is
    no folder of it here.

    Examples:
      penstock view runs/run-20260101-120000
      penstock view runs/a runs/b --listen 0.0.0.0:8080
    """
    from console.page.view_command import view_command

    return view_command(runs, listen=listen, broker=broker)


@command(app)
def ps(directory: RunsDir = Path("runs")) -> int:
    """List the processes of local runs.

    Example:
      penstock ps
    """
    from console.inspect.local_runs import ps_command

    return ps_command(directory)


@command(app)
def logs(
    run_dir: RunDir,
    service: Annotated[str | None, typer.Argument(metavar="[SERVICE]", help="One service; all if omitted.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue as lines are written.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each.")] = 20,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="GROUP/INDEX", help="Follow one sample through every service, in order."),
    ] = None,
) -> int:
    """Show the logs of a local run's services.

    Examples:
      penstock logs runs/run-20260101-120000
      penstock logs runs/run-20260101-120000 generator-0 -f
      penstock logs runs/run-20260101-120000 --sample 0-17/3
    """
    from console.inspect.local_runs import logs_command
    from console.inspect.sample_log import sample_log_command

    if sample is not None:
        return sample_log_command(run_dir, sample)
    return logs_command(run_dir, service, follow=follow, num_lines=lines)


@command(app)
def stop(run_dir: RunDir) -> int:
    """Stop a local run as Ctrl-C does: after a checkpoint; continue it with `penstock run --resume`.

    Example:
      penstock stop runs/run-20260101-120000
    """
    from console.inspect.local_runs import stop_command

    return stop_command(run_dir)


@command(app)
def doctor(
    machine: Annotated[
        Path | None,
        typer.Argument(metavar="[MACHINE.yaml]", help="Check what this machine of a deployment needs instead."),
    ] = None,
) -> int:
    """Check what a run needs on this machine, and what is missing; exit status 1 if a run is impossible.

    Examples:
      penstock doctor
      penstock doctor out/r1/machine-l4-0.yaml
    """
    from console.deploy.machine_check import machine_command
    from console.inspect.doctor import doctor_command

    return doctor_command() if machine is None else machine_command(machine)


for part in (cli_recording.app, cli_planning.app, cli_recording.merge_app, cli_bench.app, cli_runs.app):
    app.add_typer(part)
for part in (cli_environments.app, cli_certs.openai_app, cli_certs.app):
    app.add_typer(part)


def main() -> None:
    """Entry point."""
    app(prog_name="penstock")
